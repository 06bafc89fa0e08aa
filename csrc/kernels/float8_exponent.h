#pragma once

#include <bit>
#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// 2^exponent as a float: exponents of records are those of normal numbers.
inline float power_of_exponent(int8_t exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

/// The smallest e with largest <= 448 * 2^e, within what dtype can hold: see encode_records().
inline int8_t float8_exponent(float largest, DType dtype) {
  const bool is_half = dtype == DType::kFloat16;
  const int lowest = is_half ? -15 : -117;
  const int highest = is_half ? 7 : 119;
  // largest = m * 2^k with 1 <= m < 2, and 448 = 1.75 * 2^8; subnormals are below all exponents.
  const auto bits = std::bit_cast<uint32_t>(largest);
  const int k = static_cast<int>(bits >> 23) - 127;
  const int exponent = k - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
  return static_cast<int8_t>(exponent < lowest ? lowest : exponent > highest ? highest : exponent);
}

}  // namespace kvswap
