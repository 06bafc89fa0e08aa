#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace kvswap {

/// What overflows is this, which no budget and no disk holds; sums of some of it do not overflow.
inline constexpr int64_t kTooManyBytes = std::numeric_limits<int64_t>::max() / 64;

/// Of sizes that users choose.
inline int64_t size_product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return kTooManyBytes;
  }
  return std::min(result, kTooManyBytes);
}

}  // namespace kvswap
