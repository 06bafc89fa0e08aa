#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace kvswap::cuda {

inline constexpr float kFloat8Max = 448.0f;

/// e4m3 without infinities: 0x7f is NaN. In bit operations, since sm_80 has no instruction for it.
__device__ inline float float8_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  const uint32_t sign = (bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u);
  // The exponent's bias is 7, not 127: 2^120 makes up for it, for subnormals too.
  const float scaled = __uint_as_float(magnitude << 20) * 0x1p120f;
  return __uint_as_float(sign | __float_as_uint(scaled));
}

/// Rounds to nearest, ties to even; beyond 448 by half a step and more: NaN.
__device__ inline uint32_t float8_from_float(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x43f00000u) return sign | 0x7fu;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 in steps of 2^-9: adding 2^14 rounds to one and leaves it in the lowest bits.
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - 0x46800000u);
  }
  magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
  return sign | (magnitude - 0x3c000000u) >> 20;
}

/// One element in e4m3; what is used of it is its value times a power of two.
struct Float8 {
  uint8_t bits;
};
__device__ inline float to_float(Float8 value) { return float8_to_float(value.bits); }

/// 2^exponent, of a normal number.
__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

/// The two elements in e4m3 of the low 16 bits. Every one of them is an fp16 number too, which is
/// where the instruction of sm_89 and later leads.
__device__ inline void unpack_float8_pair(uint32_t bits, float& low, float& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bits)));
  unpack_pair<Float16>(halves, low, high);
#else
  low = float8_to_float(bits & 0xffu);
  high = float8_to_float(bits >> 8 & 0xffu);
#endif
}

/// Four elements in e4m3 times `factor`; exact for the factors of records, see encode_records().
__device__ inline float4 decode_four(uint32_t bytes, float factor) {
  float4 values;
  unpack_float8_pair(bytes, values.x, values.y);
  unpack_float8_pair(bytes >> 16, values.z, values.w);
  return make_float4(values.x * factor, values.y * factor, values.z * factor, values.w * factor);
}

/// Eight of them as one vector of a 16-bit type.
template <typename T>
__device__ inline uint4 decode_eight(uint2 bytes, float factor) {
  const float4 low = decode_four(bytes.x, factor);
  const float4 high = decode_four(bytes.y, factor);
  return make_uint4(pack_pair<T>(low.x, low.y), pack_pair<T>(low.z, low.w),
                    pack_pair<T>(high.x, high.y), pack_pair<T>(high.z, high.w));
}

}  // namespace kvswap::cuda
