#include <cuda_runtime.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {
namespace {

inline constexpr int64_t kTileBlocks = 32;

/// Up to 32 blocks, whose tokens all count.
template <typename T, int kQueries>
struct ScoredTile {
  __device__ ScoredTile(const BatchScoreArgs& args, int64_t sequence, int64_t first_query,
                        int64_t first_block)
      : args(args), sequence(sequence), first_query(first_query), first_block(first_block) {
    const int64_t left = args.tokens / kBlockRows - first_block;
    blocks = static_cast<int>(left < kTileBlocks ? left : kTileBlocks);
  }

  __device__ bool counts(int, int) const { return true; }
  __device__ BlockSource<T> find(int block) const {
    return find_block<T>(args.summary, sequence, first_block + block);
  }
  __device__ void write(int block, int token, bool, const float (&scores)[kQueries]) const {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (first_query + q >= args.queries) break;
      const int64_t row = sequence * args.queries + first_query + q;
      args.scores[row * args.tokens + (first_block + block) * kBlockRows + token] = scores[q];
    }
  }

  const BatchScoreArgs& args;
  int64_t sequence;
  int64_t first_query;
  int64_t first_block;
  int blocks;
};

/// Grid: (tiles of 32 blocks, query tiles, batch).
template <typename T, int kQueries>
__global__ void __launch_bounds__(kScoreThreads) score_tokens(BatchScoreArgs args) {
  __shared__ float staged[kQueries * kRankMax];
  const int rank = static_cast<int>(args.summary.rank);
  const int64_t sequence = blockIdx.z;
  const int64_t first_query = static_cast<int64_t>(blockIdx.y) * kQueries;
  const int64_t row = sequence * args.queries + first_query;
  stage_queries<kQueries>(args.query + row * rank, args.queries - first_query, rank, staged);
  __syncthreads();
  const ScoredTile<T, kQueries> tile(args, sequence, first_query, blockIdx.x * kTileBlocks);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  score_blocks<T, kQueries>(warp, tile.blocks, kScoreWarps, {staged, rank}, tile);
}

}  // namespace

Status low_rank_score(const BatchScoreArgs& args, void* stream) {
  constexpr const char* kWhere = "low_rank_score";
  if (args.tokens == 0) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(check_summary(kWhere, args.summary));
  return with_summary_type(args.summary.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    const bool is_one = args.queries == 1;
    const Grid grid = {.x = ceil_div(args.tokens / kBlockRows, kTileBlocks),
                       .y = ceil_div(args.queries, is_one ? 1 : kQueryTile),
                       .z = args.batch};
    return launch(kWhere, stream, grid, kScoreThreads,
                  is_one ? score_tokens<T, 1> : score_tokens<T, kQueryTile>, args);
  });
}

}  // namespace kvswap::cuda
