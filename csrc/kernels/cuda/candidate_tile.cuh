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

/// Blocks of candidates from `first_token` on, and where their scores go.
template <typename T, int kQueries>
struct CandidateTile {
  __device__ bool counts(int block, int token) const {
    return range.has(first_token + block * kBlockRows + token);
  }
  __device__ BlockSource<T> find(int block) const {
    return find_block<T>(summary, sequence, first_token / kBlockRows + block);
  }
  __device__ void write(int block, int token, bool counts, const float (&scores)[kQueries]) const {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      staged[q * kGappedTokensMax + gapped(block * kBlockRows + token)] =
          counts ? scores[q] : never();
    }
  }

  const SummaryTable& summary;
  const TokenRange& range;
  int64_t sequence;
  int64_t first_token;
  float* staged;
};

/// Scores of the tile's tokens into `staged` [kQueries, kGappedTokensMax]; -inf where one does not
/// count. Blocks in which none does are not read.
template <typename T, int kQueries>
__device__ inline void score_tile(const BatchSelectArgs& args, int tile_tokens,
                                  const TokenRange& range, int64_t sequence, int64_t first_token,
                                  const float* query, float* staged) {
  const CandidateTile<T, kQueries> tile = {args.summary, range, sequence, first_token, staged};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  score_blocks<T, kQueries>(warp, tile_tokens / kBlockRows, kScoreWarps,
                            {query, static_cast<int>(args.summary.rank)}, tile);
}

__device__ inline bool is_excluded(const BatchSelectArgs& args, int64_t sequence, int64_t group) {
  for (int64_t i = 0; i < args.excluded_max; ++i) {
    if (args.excluded[sequence * args.excluded_max + i] == group) return true;
  }
  return false;
}

}  // namespace kvswap::cuda
