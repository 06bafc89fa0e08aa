#include <cuda_runtime.h>

#include "kernels/cuda/float8.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace kvswap::cuda {
namespace {

/// No larger than what e4m3 has, which a quotient of tiny numbers can be; NaN stays.
__device__ inline float representable(float value) {
  if (value > kFloat8Max) return kFloat8Max;
  return value < -kFloat8Max ? -kFloat8Max : value;
}

/// Correctly rounded quotients by one positive number, as operator/ has them, for less than half of
/// its cost.
struct Quotient {
  float divisor;
  float inverse;
  bool is_usual;  // no step below over- or underflows where that would count

  __device__ explicit Quotient(float divisor)
      : divisor(divisor),
        inverse(1.0f / divisor),
        is_usual(divisor > 0x1p-80f && divisor < 0x1p100f) {}

  __device__ float of(float value) const {
    if (!is_usual) return value / divisor;
    const float near = value * inverse;
    // Of a zero what is left has the wrong sign.
    return copysignf(fmaf(fmaf(-near, divisor, value), inverse, near), value);
  }
};

/// Two elements of e4m3, the first in the lower byte.
__device__ inline uint32_t float8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  // The instruction forgets the sign of what is no number.
  const uint32_t signs = (low != low ? __float_as_uint(low) >> 24 & 0x80u : 0u) |
                         (high != high ? __float_as_uint(high) >> 16 & 0x8000u : 0u);
  return pair | signs;
#else
  return float8_from_float(representable(low)) | float8_from_float(representable(high)) << 8;
#endif
}

template <int kWidth>
__device__ void store_float8(uint8_t* target, const float (&values)[kWidth],
                             const Quotient& by_scale) {
  if constexpr (kWidth == 1) {
    *target = static_cast<uint8_t>(float8_from_float(representable(by_scale.of(values[0]))));
  } else {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      words[i / 4] |= float8_pair(by_scale.of(values[i]), by_scale.of(values[i + 1]))
                      << (i % 4 * 8);
    }
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    quantize_rows(const T* source, uint8_t* target, float* scales, RowTeams teams) {
  const RowPlace place(teams);
  const int64_t first = place.row * teams.vectors * kWidth;
  float values[kWidth] = {};
  float largest = 0.0f;
  const auto take = [&](int vector) {
    load_row(source + first + vector * kWidth, values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(values[i]));
  };
  if (place.is_inside) {
    for (int v = place.lane + teams.team; v < teams.vectors; v += teams.team) take(v);
    // Last, so that the common row of one round is read once.
    if (place.lane < teams.vectors) take(place.lane);
  }
  for (int step = teams.team / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, step));
  }
  if (!place.is_inside) return;
  const float step = largest / kFloat8Max;
  const float scale = step > 0.0f ? step : 1.0f;
  if (place.lane == 0) scales[place.row] = scale;
  if (place.lane >= teams.vectors) return;
  const Quotient by_scale(scale);
  store_float8(target + first + place.lane * kWidth, values, by_scale);
  for (int v = place.lane + teams.team; v < teams.vectors; v += teams.team) {
    load_row(source + first + v * kWidth, values);
    store_float8(target + first + v * kWidth, values, by_scale);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    dequantize_rows(const uint8_t* source, T* target, const float* scales, RowTeams teams) {
  const RowPlace place(teams);
  if (!place.is_inside) return;
  const float scale = scales[place.row];
  for (int v = place.lane; v < teams.vectors; v += teams.team) {
    const int64_t at = (place.row * teams.vectors + v) * kWidth;
    float values[kWidth];
    if constexpr (kWidth == 1) {
      values[0] = float8_to_float(source[at]) * scale;
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(source + at);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[i] = float8_to_float((i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0xffu) * scale;
      }
    }
    store_row(target + at, values);
  }
}

template <typename T, int kWidth>
Status quantize(const Fp8Args& args, void* stream) {
  const RowTeams teams = row_teams(args.rows, args.head_dim, kWidth);
  return launch("fp8_quantize", stream, row_grid(teams), kRowThreads, quantize_rows<T, kWidth>,
                static_cast<const T*>(args.source), static_cast<uint8_t*>(args.target), args.scales,
                teams);
}

template <typename T, int kWidth>
Status dequantize(const Fp8Args& args, void* stream) {
  const RowTeams teams = row_teams(args.rows, args.head_dim, kWidth);
  return launch("fp8_dequantize", stream, row_grid(teams), kRowThreads, dequantize_rows<T, kWidth>,
                static_cast<const uint8_t*>(args.source), static_cast<T*>(args.target),
                static_cast<const float*>(args.scales), teams);
}

}  // namespace

Status fp8_quantize(const Fp8Args& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("fp8_quantize", args.dtype));
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return args.head_dim % kRowElements == 0 ? quantize<T, kRowElements>(args, stream)
                                             : quantize<T, 1>(args, stream);
  });
}

Status fp8_dequantize(const Fp8Args& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("fp8_dequantize", args.dtype));
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return args.head_dim % kRowElements == 0 ? dequantize<T, kRowElements>(args, stream)
                                             : dequantize<T, 1>(args, stream);
  });
}

}  // namespace kvswap::cuda
