#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/group_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {

/// The tokens of a sequence that count.
struct TokenRange {
  __device__ TokenRange(const BatchSelectArgs& args, int64_t sequence)
      : first(args.first_tokens ? args.first_tokens[sequence] : 0),
        last(args.last_tokens ? args.last_tokens[sequence] : args.groups * args.group_tokens),
        words(args.valid ? args.valid + sequence * args.valid_stride : nullptr) {}

  __device__ bool has(int64_t token) const {
    if (token < first || token >= last) return false;
    return words == nullptr || (words[token / 64] >> (token % 64) & 1) != 0;
  }

  int64_t first;
  int64_t last;
  const uint64_t* words;
};

/// Scores of the tile's tokens into `staged` [kQueries, kGappedTokensMax]; -inf where one does not
/// count. Blocks in which none does are not read.
template <typename T, int kQueries>
__device__ inline void score_tile(const BatchSelectArgs& args, int tile_tokens,
                                  const TokenRange& range, int64_t sequence, int64_t first_token,
                                  const float* query, float* staged) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(args.summary.rank);
  const int blocks = tile_tokens / kBlockRows;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < blocks; i += kScoreWarps) {
    const int64_t block_token = first_token + i * kBlockRows;
    const int in_block = BlockLanes<T>::token_of(lane % kBlockRows);
    const bool counts = range.has(block_token + in_block);
    float scores[kQueries] = {};
    float scale = 1.0f;
    if (__any_sync(kWholeWarp, counts)) {
      const BlockAddress<T> source =
          find_block<T>(args.summary, sequence, block_token / kBlockRows);
      score_block<T>(source.rows, query, rank, rank, lane, scores);
      if (source.scales) scale = source.scales[in_block];
    }
    if (lane >= kBlockRows) continue;
    const int at = gapped(i * kBlockRows + in_block);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      staged[q * kGappedTokensMax + at] = counts ? scores[q] * scale : never();
    }
  }
}

__device__ inline bool is_excluded(const BatchSelectArgs& args, int64_t sequence, int64_t group) {
  for (int64_t i = 0; i < args.excluded_max; ++i) {
    if (args.excluded[sequence * args.excluded_max + i] == group) return true;
  }
  return false;
}

}  // namespace kvswap::cuda
