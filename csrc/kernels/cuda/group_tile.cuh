#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <numeric>

#include "kernels/low_rank_score.h"

namespace kvswap::cuda {

/// Scores of a tile stand in shared memory with a gap after every 32, so that threads which walk
/// over neighbouring groups meet in no bank.
__host__ __device__ constexpr int gapped(int index) { return index + index / 32; }

inline constexpr int kTileTokensMax = 1024;
inline constexpr int kGappedTokensMax = gapped(kTileTokensMax);

/// Tokens of a tile of select_groups(): whole summary blocks and whole groups, about 512.
constexpr int64_t select_tile_tokens(int64_t group_tokens) {
  const int64_t unit = std::lcm(kSummaryBlock, group_tokens);
  return unit >= 512 ? unit : 512 / unit * unit;
}

/// Tokens of a tile of group_max(): whole groups, at most kTileTokensMax.
constexpr int64_t max_tile_tokens(int64_t group_tokens) {
  return kTileTokensMax / group_tokens * group_tokens;
}

}  // namespace kvswap::cuda
