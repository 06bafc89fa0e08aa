#include <cuda_runtime.h>

#include "kernels/cuda/float8.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/float8_exponent.h"

namespace kvswap::cuda {
namespace {

inline constexpr int kCodecThreads = 128;
inline constexpr int kCodecWarps = kCodecThreads / 32;

struct EncodeJob {
  const void* const* from = nullptr;
  void* const* to = nullptr;
  int8_t* exponents = nullptr;
  int64_t sides = 1;     // of a record: K and V of each KV head
  int64_t elements = 0;  // of a side
  int lowest = 0;        // exponents
  int highest = 0;
};

__device__ inline bool is_finite(float value) {
  return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

/// float8_exponent() of kernels/float8_exponent.h, in what a device has.
__device__ inline int exponent_of(float largest, int lowest, int highest) {
  const uint32_t bits = __float_as_uint(largest);
  const int wanted = static_cast<int>(bits >> 23) - 135 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return wanted < lowest ? lowest : wanted > highest ? highest : wanted;
}

/// Finite values beyond 448 become 448; others stay what they are.
__device__ inline uint32_t encode(float value, float factor) {
  float scaled = value * factor;
  if (is_finite(scaled)) scaled = fminf(fmaxf(scaled, -kFloat8Max), kFloat8Max);
  return float8_from_float(scaled);
}

/// A block has one side of one record: looks for its largest magnitude, then encodes it.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kCodecThreads) encode_sides(EncodeJob job) {
  __shared__ float largest_of[kCodecWarps];
  const int64_t side = blockIdx.x;
  const int64_t offset = side % job.sides * job.elements;
  const T* source = static_cast<const T*>(job.from[side / job.sides]) + offset;
  auto* target = static_cast<uint8_t*>(job.to[side / job.sides]) + offset;
  const int thread = static_cast<int>(threadIdx.x);
  float values[kWidth];
  float largest = 0.0f;
  for (int64_t at = thread * kWidth; at < job.elements; at += kCodecThreads * kWidth) {
    load_row(source + at, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (is_finite(values[i])) largest = fmaxf(largest, fabsf(values[i]));
    }
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, bit));
  }
  if (thread % 32 == 0) largest_of[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kCodecWarps; ++warp) largest = fmaxf(largest, largest_of[warp]);
  const int exponent = exponent_of(largest, job.lowest, job.highest);
  if (thread == 0) job.exponents[side] = static_cast<int8_t>(exponent);
  const float factor = power_of_two(-exponent);
  for (int64_t at = thread * kWidth; at < job.elements; at += kCodecThreads * kWidth) {
    load_row(source + at, values);
    if constexpr (kWidth == 1) {
      target[at] = static_cast<uint8_t>(encode(values[0], factor));
    } else {
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) words[i / 4] |= encode(values[i], factor) << (i % 4 * 8);
      *reinterpret_cast<uint2*>(target + at) = make_uint2(words[0], words[1]);
    }
  }
}

}  // namespace

Status encode_records(const RecordCodecArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("encode_records", args.dtype));
  const auto [lowest, highest] = float8_exponents(args.dtype);
  EncodeJob job;
  job.from = args.from;
  job.to = args.to;
  job.exponents = args.exponents;
  job.sides = args.shape.kv_heads * 2;
  job.elements = args.shape.group_tokens * args.shape.head_dim;
  job.lowest = lowest;
  job.highest = highest;
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch(
        "encode_records", stream, {.x = args.count * job.sides}, kCodecThreads,
        job.elements % kRowElements == 0 ? encode_sides<T, kRowElements> : encode_sides<T, 1>, job);
  });
}

}  // namespace kvswap::cuda
