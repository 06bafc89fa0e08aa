#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/types.h"

namespace kvswap::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline constexpr int kVectorBytes = 16;
/// Elements in one 16-byte move.
template <typename T>
inline constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

/// Of a row in levels, by its largest magnitude: 0, or a number that has an inverse.
__device__ inline float level_scale(float largest, float levels) {
  constexpr float kLeast = 1.17549435e-38f;  // the smallest normal number
  const float scale = largest / levels;
  return scale > 0.0f && scale < kLeast ? kLeast : scale;
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float to_float(Float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

/// Rounds to nearest, ties to even.
template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
__device__ inline Float16 from_float<Float16>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}

/// Two 16-bit elements of one register.
template <typename T>
__device__ inline uint32_t pack_pair(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <typename T>
__device__ inline void unpack_pair(uint32_t word, float& low, float& high) {
  low = to_float(T{static_cast<uint16_t>(word & 0xffff)});
  high = to_float(T{static_cast<uint16_t>(word >> 16)});
}

__device__ inline uint4 load_vector(const void* source) {
  return *static_cast<const uint4*>(source);
}
__device__ inline void store_vector(void* target, uint4 vector) {
  *static_cast<uint4*>(target) = vector;
}

/// The elements of one 16-byte vector as floats.
template <typename T>
__device__ inline void unpack(uint4 vector, float (&values)[kVector<T>]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else if constexpr (sizeof(T) == 2) {
      unpack_pair<T>(words[i], values[2 * i], values[2 * i + 1]);
    } else {
      // A byte b in the low bits of 2^23 reads as 2^23 + b: cheaper than a conversion.
      const uint32_t shifted = words[i] ^ 0x80808080u;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t bits = __byte_perm(shifted, 0x4b000000u, 0x7440u + b);
        values[4 * i + b] = __uint_as_float(bits) - 8388736.0f;
      }
    }
  }
}

template <typename T>
__device__ inline uint4 pack(const float (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                      __float_as_uint(values[2]), __float_as_uint(values[3]));
  } else {
    return make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                      pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
  }
}

/// Names an element type without making one.
template <typename T>
struct TypeName {
  using Type = T;
};

/// visit(TypeName<T>) with the element type of a floating dtype; its callers have checked that.
template <typename Visit>
auto with_floating(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(TypeName<BFloat16>{});
    case DType::kFloat16:
      return visit(TypeName<Float16>{});
    default:
      return visit(TypeName<float>{});
  }
}

/// The same with the element type of a summary, int8 or floating.
template <typename Visit>
auto with_summary_type(DType dtype, const Visit& visit) {
  if (dtype == DType::kInt8) return visit(TypeName<int8_t>{});
  return with_floating(dtype, visit);
}

inline constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ inline float never() { return __uint_as_float(0xff800000u); }   // -infinity
__device__ inline float always() { return __uint_as_float(0x7f800000u); }  // infinity
__device__ inline float no_number() { return __uint_as_float(0x7fc00000u); }
/// NaN in the place of an infinite number.
__device__ inline float finite_or_nan(float value) {
  return fabsf(value) < always() ? value : no_number();
}

}  // namespace kvswap::cuda
