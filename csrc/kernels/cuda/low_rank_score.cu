#include <cuda_runtime.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {
namespace {

inline constexpr int64_t kTileBlocks = 32;

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
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t blocks = args.tokens / kBlockRows;
  for (int64_t i = threadIdx.x / 32; i < kTileBlocks; i += kScoreWarps) {
    const int64_t block = blockIdx.x * kTileBlocks + i;
    if (block >= blocks) break;
    const BlockAddress<T> source = find_block<T>(args.summary, sequence, block);
    float scores[kQueries];
    score_block<T>(source.rows, staged, rank, rank, lane, scores);
    if (lane >= kBlockRows) continue;
    const int token = BlockLanes<T>::token_of(lane);
    const float scale = source.scales ? source.scales[token] : 1.0f;
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (first_query + q >= args.queries) break;
      args.scores[(row + q) * args.tokens + block * kBlockRows + token] = scores[q] * scale;
    }
  }
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
