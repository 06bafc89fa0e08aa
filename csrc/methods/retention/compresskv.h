#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvswap {

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
///
/// Which tokens they are (3.2) SnapKv says, asked of the retrieval heads alone; `kvswap calibrate`
/// finds heads and shares (3.1, 3.3).
std::vector<int64_t> divide_by_share(const ShareArgs& args);

}  // namespace kvswap
