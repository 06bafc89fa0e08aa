#pragma once

#include <cstdint>

#include "kernels/int8_score.h"

namespace kvswap {

/// Groups' weights are written in whole vectors: a head has room for as many.
inline constexpr int64_t kMassUnit = 64;

struct Int8MassArgs {
  const int8_t* summary = nullptr;     // [blocks, rank, 16]
  const float* token_scale = nullptr;  // [blocks, 16]
  const int8_t* query = nullptr;       // [heads, int8_stride(rank)]: -127..127
  const float* factors = nullptr;      // [heads], as of WeighGroupsArgs
  const uint64_t* counted = nullptr;   // [ceil(tokens / 64)]: a bit a token, set for candidates
  float* weights = nullptr;            // [heads, weight_stride] out
  float* largest = nullptr;            // [heads] out
  float* sums = nullptr;               // [heads] out
  int64_t weight_stride = 0;           // at least ceil(tokens / 64) * 64
  int64_t tokens = 0;
  int64_t group_tokens = 0;
  int64_t rank = 0;
  int64_t heads = 0;
};

/// int8_score() and weigh_groups() in one pass that keeps no products: a row is read once for all
/// heads. A head's weights are relative to its largest exponent among the first candidates, which
/// `largest` then is, and within 1e-5 of 2^exponent.
///
/// False where this is not for it, and the two are to be called: without the byte products of
/// AVX-512 (VNNI), for groups that are no power of two, and where a scale is no number or a weight
/// overflows.
[[nodiscard]] bool int8_mass(const Int8MassArgs& args);

}  // namespace kvswap
