#include <cuda_runtime.h>

#include "kernels/cuda/candidate_tile.cuh"
#include "kernels/cuda/group_max.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {
namespace {

struct SelectJob {
  BatchSelectArgs args = {};
  float* group_scores = nullptr;  // [batch, queries, score_stride]
  int64_t score_stride = 0;
  int64_t tile_tokens = 0;
};

/// Grid: (tiles, query tiles, batch).
template <typename T, int kQueries>
__global__ void __launch_bounds__(kScoreThreads, 2) score_groups(SelectJob job) {
  __shared__ float query[kQueries * kRankMax];
  __shared__ float staged[kQueries * kGappedTokensMax];
  const BatchSelectArgs& args = job.args;
  const int64_t sequence = blockIdx.z;
  const int64_t first_query = static_cast<int64_t>(blockIdx.y) * kQueries;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * job.tile_tokens;
  const int rank = static_cast<int>(args.summary.rank);
  const int64_t row = sequence * args.queries + first_query;
  const TokenRange range(args, sequence);
  const int group_tokens = static_cast<int>(args.group_tokens);
  const int64_t first_group = static_cast<int64_t>(blockIdx.x) * (job.tile_tokens / group_tokens);
  const int64_t left = args.groups - first_group;
  const int tile_groups = static_cast<int>(job.tile_tokens) / group_tokens;
  const int groups = left < tile_groups ? static_cast<int>(left) : tile_groups;

  const bool is_scored = first_token < range.last && first_token + job.tile_tokens > range.first;
  if (is_scored) {
    stage_queries<kQueries>(args.query + row * rank, args.queries - first_query, rank, query);
    __syncthreads();
    score_tile<T, kQueries>(args, static_cast<int>(job.tile_tokens), range, sequence, first_token,
                            query, staged);
    __syncthreads();
  }
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kScoreThreads) {
    const bool may_be_chosen = is_scored && !is_excluded(args, sequence, first_group + group);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (first_query + q >= args.queries) break;
      job.group_scores[(row + q) * job.score_stride + first_group + group] =
          may_be_chosen ? largest_of_group(staged + q * kGappedTokensMax, group, group_tokens,
                                           static_cast<int>(job.tile_tokens))
                        : never();
    }
  }
}

int64_t score_stride_of(int64_t groups) { return round_up(groups, kVector<float>); }

int64_t scores_bytes_of(const BatchSelectArgs& args) {
  const int64_t scores = args.batch * args.queries * score_stride_of(args.groups);
  return round_up(scores * int64_t{sizeof(float)}, kVectorBytes);
}

}  // namespace

int64_t select_groups_scratch_bytes(const BatchSelectArgs& args) {
  const int64_t best = top_k_scratch_bytes(args.batch * args.queries, args.groups, args.k);
  const int64_t mass = args.heads > 0 ? mass_scores_scratch_bytes(args) : 0;
  return scores_bytes_of(args) + (best > mass ? best : mass);  // one after the other
}

Status select_groups(const BatchSelectArgs& args, void* stream) {
  constexpr const char* kWhere = "select_groups";
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "group_tokens", args.group_tokens, 1, 64));
  SelectJob job{.args = args};
  job.group_scores = static_cast<float*>(args.scratch);
  job.score_stride = score_stride_of(args.groups);
  job.tile_tokens = select_tile_tokens(args.group_tokens);
  void* rest = static_cast<char*>(args.scratch) + scores_bytes_of(args);
  if (args.groups > 0 && args.heads > 0) {
    KVSWAP_RETURN_IF_ERROR(mass_scores({.select = args,
                                        .group_scores = job.group_scores,
                                        .score_stride = job.score_stride,
                                        .scratch = rest},
                                       stream));
  } else if (args.groups > 0) {
    KVSWAP_RETURN_IF_ERROR(check_summary(kWhere, args.summary));
    KVSWAP_RETURN_IF_ERROR(with_summary_type(args.summary.dtype, [&](auto type) {
      using T = typename decltype(type)::Type;
      const bool is_one = args.queries == 1;
      const Grid grid = {.x = ceil_div(args.groups * args.group_tokens, job.tile_tokens),
                         .y = ceil_div(args.queries, is_one ? 1 : kQueryTile),
                         .z = args.batch};
      return launch(kWhere, stream, grid, kScoreThreads,
                    is_one ? score_groups<T, 1> : score_groups<T, kQueryTile>, job);
    }));
  }
  BatchTopKArgs best;
  best.scores = job.group_scores;
  best.indices = args.indices;
  best.chosen = args.chosen;
  best.rows = args.batch * args.queries;
  best.row_stride = job.score_stride;
  best.count = args.groups;
  best.k = args.k;
  best.wanted = args.wanted;
  best.scratch = rest;
  return top_k(best, stream);
}

}  // namespace kvswap::cuda
