#include <cuda_runtime.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace kvswap::cuda {
namespace {

/// What both sides of a row are weighed with.
struct Weights {
  float mine;
  float theirs;
  float total;  // the merged log-sum-exp
};

__device__ Weights weigh(float mine, float theirs) {
  const float larger = fmaxf(mine, theirs);
  if (mine == never() && theirs == never()) return {0.0f, 0.0f, never()};
  const float weight = expf(mine - larger);
  const float other_weight = expf(theirs - larger);
  const float sum = weight + other_weight;
  return {weight / sum, other_weight / sum, larger + logf(sum)};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    merge_rows(T* output, float* log_sum_exp, const T* other, const float* other_log_sum_exp,
               RowTeams teams) {
  const RowPlace place(teams);
  const float mine = place.is_inside ? log_sum_exp[place.row] : 0.0f;
  __syncwarp();  // the whole team has read it before its first lane writes it
  if (!place.is_inside) return;
  const Weights weights = weigh(mine, other_log_sum_exp[place.row]);
  if (place.lane == 0) log_sum_exp[place.row] = weights.total;
  for (int v = place.lane; v < teams.vectors; v += teams.team) {
    const int64_t at = (place.row * teams.vectors + v) * kWidth;
    float values[kWidth];
    float others[kWidth];
    load_row(output + at, values);
    load_row(other + at, others);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // What stands on a side that counts for nothing may be anything, NaN too.
      const float weighted = weights.mine != 0.0f ? weights.mine * values[i] : 0.0f;
      values[i] = weights.theirs != 0.0f ? fmaf(weights.theirs, others[i], weighted) : weighted;
    }
    store_row(output + at, values);
  }
}

template <typename T, int kWidth>
Status merge(const MergeAttentionArgs& args, void* stream) {
  const RowTeams teams = row_teams(args.rows, args.head_dim, kWidth);
  return launch("merge_attention", stream, row_grid(teams), kRowThreads, merge_rows<T, kWidth>,
                static_cast<T*>(args.output), args.log_sum_exp,
                static_cast<const T*>(args.other_output), args.other_log_sum_exp, teams);
}

}  // namespace

Status merge_attention(const MergeAttentionArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("merge_attention", args.dtype));
  if (args.other_dtype != args.dtype) {
    return Status::invalid("merge_attention: both sides must have one type on CUDA");
  }
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return args.head_dim % kRowElements == 0 ? merge<T, kRowElements>(args, stream)
                                             : merge<T, 1>(args, stream);
  });
}

}  // namespace kvswap::cuda
