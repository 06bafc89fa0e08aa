#pragma once

#include <bit>
#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// 2^exponent as a float: exponents of records are those of normal numbers.
inline float power_of_exponent(int8_t exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

/// What an exponent may be, so that dtype holds every decoded value exactly.
struct Float8Exponents {
  int lowest = 0;
  int highest = 0;
};
inline Float8Exponents float8_exponents(DType dtype) {
  return dtype == DType::kFloat16 ? Float8Exponents{-15, 7} : Float8Exponents{-117, 119};
}
inline bool is_float8(int8_t exponent, DType dtype) {
  const Float8Exponents range = float8_exponents(dtype);
  return exponent >= range.lowest && exponent <= range.highest;
}

/// The smallest e with largest <= 448 * 2^e, within what dtype can hold: see encode_records().
inline int8_t float8_exponent(float largest, DType dtype) {
  const auto [lowest, highest] = float8_exponents(dtype);
  // largest = m * 2^k with 1 <= m < 2, and 448 = 1.75 * 2^8; subnormals are below all exponents.
  const auto bits = std::bit_cast<uint32_t>(largest);
  const int k = static_cast<int>(bits >> 23) - 127;
  const int exponent = k - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
  return static_cast<int8_t>(exponent < lowest ? lowest : exponent > highest ? highest : exponent);
}

}  // namespace kvswap
