#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvswap {

/// How a prompt's newest queries look at the tokens before them, in one layer (CAKE 4.1).
struct AttentionSpread {
  double dispersion = 0;  // sum of -a ln a over the attention of each query of each head
  double change = 0;      // sum over heads and tokens of the variance over queries

  void add(double received);
  /// dispersion^(1/t1) change^(1/t2) with these t; 0 where nothing changes.
  double preference(std::span<const double> temperatures) const;
};

/// CAKE 4.2: `total` tokens among layers in proportion to what they are preferred by. A layer has
/// no more than its limit; what it cannot take others have, each as many more. Layers come one
/// after the other, and those that are there divide all of it: one that comes leaves none of them
/// more than before, so that fewer than `total` may be left. preferences, limits: [layers].
std::vector<int64_t> divide_by_preference(std::span<const double> preferences,
                                          std::span<const int64_t> limits, int64_t total);

/// What layers that score more or less have of `average` tokens each.
struct ShareArgs {
  std::span<const double> shares;  // [layers], in any unit
  int64_t average = 0;
  int64_t least = 0;  // of a layer; at most the average
  int64_t most = 0;   // of a layer; at least the average
};

/// CompressKV 3.3: each layer has the least, and its share of what is left; what rounding and the
/// bounds leave over or lack, layers give or take one by one, the one with the largest share first
/// to take and last to give. [layers], `average` each in all.
std::vector<int64_t> divide_by_share(const ShareArgs& args);

}  // namespace kvswap
