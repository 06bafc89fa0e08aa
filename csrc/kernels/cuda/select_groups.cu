#include <cuda_runtime.h>

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
__device__ void score_tile(const SelectJob& job, const TokenRange& range, int64_t sequence,
                           int64_t first_token, const float* query, float* staged) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(job.args.summary.rank);
  const int blocks = static_cast<int>(job.tile_tokens) / kBlockRows;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < blocks; i += kScoreWarps) {
    const int64_t block_token = first_token + i * kBlockRows;
    const int in_block = BlockLanes<T>::token_of(lane % kBlockRows);
    const bool counts = range.has(block_token + in_block);
    float scores[kQueries] = {};
    float scale = 1.0f;
    if (__any_sync(kWholeWarp, counts)) {
      const BlockAddress<T> source =
          find_block<T>(job.args.summary, sequence, block_token / kBlockRows);
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

__device__ bool is_excluded(const BatchSelectArgs& args, int64_t sequence, int64_t group) {
  for (int64_t i = 0; i < args.excluded_max; ++i) {
    if (args.excluded[sequence * args.excluded_max + i] == group) return true;
  }
  return false;
}

/// Grid: (tiles, query tiles, batch).
template <typename T, int kQueries>
__global__ void __launch_bounds__(kScoreThreads) score_groups(SelectJob job) {
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
    score_tile<T, kQueries>(job, range, sequence, first_token, query, staged);
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

}  // namespace

int64_t select_groups_scratch_bytes(int64_t batch, int64_t queries, int64_t groups, int64_t k) {
  const int64_t scores = batch * queries * score_stride_of(groups) * int64_t{sizeof(float)};
  return round_up(scores, kVectorBytes) + top_k_scratch_bytes(batch * queries, groups, k);
}

Status select_groups(const BatchSelectArgs& args, void* stream) {
  constexpr const char* kWhere = "select_groups";
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "group_tokens", args.group_tokens, 1, 64));
  SelectJob job{.args = args};
  job.group_scores = static_cast<float*>(args.scratch);
  job.score_stride = score_stride_of(args.groups);
  job.tile_tokens = select_tile_tokens(args.group_tokens);
  if (args.groups > 0) {
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
  const int64_t scores = args.batch * args.queries * job.score_stride;
  BatchTopKArgs best;
  best.scores = job.group_scores;
  best.indices = args.indices;
  best.chosen = args.chosen;
  best.rows = args.batch * args.queries;
  best.row_stride = job.score_stride;
  best.count = args.groups;
  best.k = args.k;
  best.scratch = job.group_scores + round_up(scores, kVector<float>);
  return top_k(best, stream);
}

}  // namespace kvswap::cuda
