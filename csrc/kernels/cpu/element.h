#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/types.h"

namespace kvswap {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8 {
  uint8_t bits;  // e4m3: no infinities, 0x7f is NaN
};

/// Two columns of an int4 row.
struct Int4Pair {
  int8_t bits;
};
inline int8_t low_half(Int4Pair pair) {
  return static_cast<int8_t>(static_cast<uint8_t>(pair.bits) << 4) >> 4;
}
inline int8_t high_half(Int4Pair pair) { return pair.bits >> 4; }

/// Of a row in levels, by its largest magnitude: 0, or a number that has an inverse.
inline float level_scale(float largest, float levels) {
  const float scale = largest / levels;
  const float least = std::numeric_limits<float>::min();
  return scale > 0.0f && scale < least ? least : scale;
}

inline float to_float(float value) { return value; }
inline float to_float(int8_t value) { return value; }
inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  if (magnitude >= 0x0f800000) return std::bit_cast<float>(sign | magnitude | 0x7f800000);
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

inline float to_float(Float8 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t sign = uint32_t{value.bits & 0x80u} << 24;
  if (magnitude == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

/// Rounds to nearest, ties to even, as torch does.
template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  if (value != value) return {0x7fc0};
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded bits at the bottom
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
  }
  magnitude += 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000) >> 13))};
}

template <>
inline Float8 from_float<Float8>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x43f00000) return {static_cast<uint8_t>(sign | 0x7f)};  // 480 and above
  if (magnitude < 0x3c800000) {  // below 2^-6: subnormal, in steps of 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000))};
  }
  magnitude += 0x7ffff + ((magnitude >> 20) & 1);
  return {static_cast<uint8_t>(sign | ((magnitude - 0x3c000000) >> 20))};
}

/// Calls body with a pointer to elements of the dtype's type; int4, of low-rank rows alone, has
/// none.
template <typename Body>
void with_elements(const void* data, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<const float*>(data));
    case DType::kBFloat16:
      return body(static_cast<const BFloat16*>(data));
    case DType::kFloat16:
      return body(static_cast<const Float16*>(data));
    case DType::kInt8:
      return body(static_cast<const int8_t*>(data));
    case DType::kInt4:
      return;
  }
}

}  // namespace kvswap
