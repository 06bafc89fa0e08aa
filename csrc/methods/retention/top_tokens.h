#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "methods/selection/padding_mask.h"

namespace kvswap {

inline constexpr int64_t kKeepPoolMax = 63;

/// Each becomes the sum of `pool` neighbours, itself in the middle (SnapKV 4.1); what would stand
/// before the first and behind the last counts as nothing. pool: 1..kKeepPoolMax.
void pool_neighbours(std::span<float> mass, int64_t pool);

/// What a choice of tokens to keep is made of, for one sequence and layer.
struct RetainArgs {
  std::span<const float> mass;  // [sealed tokens]
  const PaddingMask* valid = nullptr;
  std::span<const int32_t> sinks = {};  // groups that stay anyway
  int64_t group_tokens = 0;
  int64_t tokens = 0;  // kept at most
  float floor = 0;     // what has no more mass is never kept
};

/// The `tokens` of them with the most mass, the best first; ties to the lower one. Padding and
/// sinks are never kept.
std::vector<int32_t> by_attention(const RetainArgs& args);
/// The same of scores that may be 0 or less; without a floor only -inf is never kept.
std::vector<int32_t> by_any_score(RetainArgs args);

}  // namespace kvswap
