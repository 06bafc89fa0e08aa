#include <cuda_runtime.h>

#include "kernels/cuda/candidate_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {
namespace {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLargestFinite = 3.402823466e38f;
inline constexpr float kSmallest = 1.175494351e-38f;
inline constexpr float kFarBelow = -126.0f;  // 2 to the power of it is the smallest normal number
inline constexpr int kJoinThreads = 256;

/// The steps of one query of each sequence; what stands in scratch is theirs alone.
struct MassJob {
  BatchSelectArgs select = {};
  int64_t query = 0;
  float* queries = nullptr;       // [batch, heads, rank]: as rows meet them
  float* factors = nullptr;       // [batch, heads]: make products exponents of 2; NaN: none counts
  float* weights = nullptr;       // [batch, heads, groups]
  float* largest = nullptr;       // [batch, heads, tiles]
  float* sums = nullptr;          // [batch, heads, tiles], then the tiles' shares
  float* group_scores = nullptr;  // [batch, queries, score_stride]
  int64_t score_stride = 0;
  int64_t tile_tokens = 0;
  int64_t tiles = 0;
};

__device__ inline float largest_of_warp(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, bit));
  }
  return value;
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) value += __shfl_xor_sync(kWholeWarp, value, bit);
  return value;
}

/// NaN and -inf: no part in the softmax. What is too large or too small for a float is its last
/// number.
__device__ inline float exponent_of(float product, float factor) {
  const float exponent = product * factor;
  if (!(product > never()) || exponent != exponent) return never();
  return fminf(fmaxf(exponent, -kLargestFinite), kLargestFinite);
}

/// Queries as rows meet them: int8 rows meet whole numbers. Grid: (heads, batch); one warp.
template <bool kIsInt8>
__global__ void __launch_bounds__(32) prepare_queries(MassJob job) {
  const BatchSelectArgs& args = job.select;
  const int rank = static_cast<int>(args.summary.rank);
  const int64_t head = blockIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.heads + head;
  const float* source =
      args.query + ((blockIdx.y * args.queries + job.query) * args.heads + head) * rank;
  float* target = job.queries + row * rank;
  float limit = 0.0f;
  bool is_number = true;
  for (int r = static_cast<int>(threadIdx.x); r < rank; r += 32) {
    limit = fmaxf(limit, fabsf(source[r]));
    is_number = is_number && fabsf(source[r]) <= kLargestFinite;
  }
  limit = largest_of_warp(limit);
  is_number = __any_sync(kWholeWarp, !is_number) == 0;
  const float scale = level_scale(limit, 127.0f);
  const float inverse = is_number && scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int r = static_cast<int>(threadIdx.x); r < rank; r += 32) {
    const float level = fminf(fmaxf(rintf(source[r] * inverse), -127.0f), 127.0f);
    target[r] = !is_number ? 0.0f : kIsInt8 ? level : source[r];
  }
  if (threadIdx.x == 0) {
    const float factor = kIsInt8 ? scale * kLog2E : kLog2E;
    job.factors[row] = is_number ? factor : no_number();
  }
}

/// A tile's products become group weights, 2^(exponent - the tile's largest). Each of the first
/// kHeads warps looks after one head where something is taken over all tokens.
template <int kHeads>
__device__ void weigh_tile(const MassJob& job, const float* factors, int groups, int64_t first_head,
                           int64_t first_group, float* staged) {
  __shared__ float largest[kHeads];
  const BatchSelectArgs& args = job.select;
  const int64_t sequence = blockIdx.z;
  const int group_tokens = static_cast<int>(args.group_tokens);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = sequence * args.heads + first_head;
  if (warp < kHeads) {
    const float* own = staged + warp * kGappedTokensMax;
    float most = never();
    for (int t = lane; t < groups * group_tokens; t += 32) {
      most = fmaxf(most, exponent_of(own[gapped(t)], factors[warp]));
    }
    most = largest_of_warp(most);
    if (lane == 0) largest[warp] = most;
  }
  __syncthreads();
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kScoreThreads) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float* own = staged + h * kGappedTokensMax;
      float weight = 0.0f;
      bool is_number = true;
      for (int t = group * group_tokens; t < (group + 1) * group_tokens; ++t) {
        const float product = own[gapped(t)];
        const float exponent = exponent_of(product, factors[h]);
        if (exponent > never()) weight += exp2f(fmaxf(exponent - largest[h], kFarBelow));
        is_number = is_number && product == product;
      }
      own[gapped(group * group_tokens)] = weight;
      const bool is_of_head = factors[h] == factors[h];
      if (first_head + h < args.heads) {
        job.weights[(row + h) * args.groups + first_group + group] =
            is_number || !is_of_head ? weight : always();
      }
    }
  }
  __syncthreads();
  if (warp < kHeads && first_head + warp < args.heads) {
    float sum = 0.0f;
    for (int group = lane; group < groups; group += 32) {
      sum += staged[warp * kGappedTokensMax + gapped(group * group_tokens)];
    }
    sum = sum_of_warp(sum);
    if (lane == 0) {
      job.largest[(row + warp) * job.tiles + blockIdx.x] = largest[warp];
      job.sums[(row + warp) * job.tiles + blockIdx.x] = sum;
    }
  }
}

/// Grid: (tiles, head tiles, batch).
template <typename T, int kHeads>
__global__ void __launch_bounds__(kScoreThreads, 2) weigh_groups(MassJob job) {
  __shared__ float query[kHeads * kRankMax];
  __shared__ float staged[kHeads * kGappedTokensMax];
  __shared__ float factors[kHeads];
  const BatchSelectArgs& args = job.select;
  const int64_t sequence = blockIdx.z;
  const int64_t first_head = static_cast<int64_t>(blockIdx.y) * kHeads;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * job.tile_tokens;
  const int rank = static_cast<int>(args.summary.rank);
  const int tile_tokens = static_cast<int>(job.tile_tokens);
  const int group_tokens = static_cast<int>(args.group_tokens);
  const int64_t row = sequence * args.heads + first_head;
  const TokenRange range(args, sequence);
  const int64_t first_group = first_token / group_tokens;
  const int64_t left = args.groups - first_group;
  const int groups =
      left < tile_tokens / group_tokens ? static_cast<int>(left) : tile_tokens / group_tokens;
  stage_queries<kHeads>(job.queries + row * rank, args.heads - first_head, rank, query);
  if (threadIdx.x < kHeads) {
    const int64_t head = first_head + threadIdx.x;
    factors[threadIdx.x] = head < args.heads ? job.factors[row + threadIdx.x] : 0.0f;
  }
  __syncthreads();
  score_tile<T, kHeads>(args, tile_tokens, range, sequence, first_token, query, staged);
  __syncthreads();
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kScoreThreads) {
    if (!is_excluded(args, sequence, first_group + group)) continue;
    for (int h = 0; h < kHeads; ++h) {
      for (int t = group * group_tokens; t < (group + 1) * group_tokens; ++t) {
        staged[h * kGappedTokensMax + gapped(t)] = never();
      }
    }
  }
  __syncthreads();
  weigh_tile<kHeads>(job, factors, groups, first_head, first_group, staged);
}

/// Turns each tile's sum into what makes its weights shares of the head's whole softmax. Grid:
/// (heads, batch); one warp.
__global__ void __launch_bounds__(32) share_tiles(MassJob job) {
  const int64_t row =
      (static_cast<int64_t>(blockIdx.y) * job.select.heads + blockIdx.x) * job.tiles;
  const int lane = static_cast<int>(threadIdx.x);
  float reference = never();
  for (int64_t tile = lane; tile < job.tiles; tile += 32) {
    reference = fmaxf(reference, job.largest[row + tile]);
  }
  reference = largest_of_warp(reference);
  float total = 0.0f;
  for (int64_t tile = lane; tile < job.tiles; tile += 32) {
    if (job.largest[row + tile] == never()) continue;
    total += exp2f(job.largest[row + tile] - reference) * job.sums[row + tile];
  }
  total = sum_of_warp(total);
  for (int64_t tile = lane; tile < job.tiles; tile += 32) {
    const bool counts = job.largest[row + tile] > never();
    job.sums[row + tile] = counts ? exp2f(job.largest[row + tile] - reference) / total : 0.0f;
  }
}

/// Grid: (groups / 256, batch).
__global__ void __launch_bounds__(kJoinThreads) join_heads(MassJob job) {
  const BatchSelectArgs& args = job.select;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kJoinThreads + threadIdx.x;
  if (group >= args.groups) return;
  const int64_t tile = group * args.group_tokens / job.tile_tokens;
  const int64_t first = blockIdx.y * args.heads;
  const bool is_sum = args.join == HeadJoin::kSum;
  float joined = 0.0f;
  float counted = 0.0f;
  for (int64_t head = first; head < first + args.heads; ++head) {
    const float weight = job.weights[head * args.groups + group];
    const float mass = weight * job.sums[head * job.tiles + tile];
    joined = is_sum ? joined + mass : fmaxf(joined, mass);
    counted = fmaxf(counted, weight);
  }
  const float score = counted > 0.0f ? fmaxf(joined, kSmallest) : never();
  job.group_scores[(blockIdx.y * args.queries + job.query) * job.score_stride + group] =
      counted > kLargestFinite ? always() : score;
}

/// Where everything stands in scratch, if it is there; returns its floats.
int64_t place(MassJob& job, float* scratch) {
  const BatchSelectArgs& args = job.select;
  const int64_t rows = args.batch * args.heads;
  job.tile_tokens = select_tile_tokens(args.group_tokens);
  job.tiles = ceil_div(args.groups * args.group_tokens, job.tile_tokens);
  int64_t floats = 0;
  const auto take = [&](int64_t count) {
    float* at = scratch == nullptr ? nullptr : scratch + floats;
    floats += round_up(count, kVector<float>);
    return at;
  };
  job.queries = take(rows * args.summary.rank);
  job.factors = take(rows);
  job.weights = take(rows * args.groups);
  job.largest = take(rows * job.tiles);
  job.sums = take(rows * job.tiles);
  return floats;
}

Status launch_query(const char* where, const MassJob& job, void* stream) {
  const BatchSelectArgs& args = job.select;
  const Grid heads = {.x = args.heads, .y = args.batch};
  const bool is_int8 = args.summary.dtype == DType::kInt8;
  KVSWAP_RETURN_IF_ERROR(launch(where, stream, heads, 32,
                                is_int8 ? prepare_queries<true> : prepare_queries<false>, job));
  KVSWAP_RETURN_IF_ERROR(with_summary_type(args.summary.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    const Grid tiles = {.x = job.tiles, .y = ceil_div(args.heads, kQueryTile), .z = args.batch};
    return launch(where, stream, tiles, kScoreThreads, weigh_groups<T, kQueryTile>, job);
  }));
  KVSWAP_RETURN_IF_ERROR(launch(where, stream, heads, 32, share_tiles, job));
  const Grid groups = {.x = ceil_div(args.groups, kJoinThreads), .y = args.batch};
  return launch(where, stream, groups, kJoinThreads, join_heads, job);
}

}  // namespace

int64_t mass_scores_scratch_bytes(const BatchSelectArgs& args) {
  MassJob job{.select = args};
  return place(job, nullptr) * int64_t{sizeof(float)};
}

Status mass_scores(const BatchMassArgs& args, void* stream) {
  constexpr const char* kWhere = "mass_scores";
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "group_tokens", args.select.group_tokens, 1, 64));
  KVSWAP_RETURN_IF_ERROR(check_summary(kWhere, args.select.summary));
  if (args.select.groups == 0) return Status::ok();
  MassJob job{.select = args.select};
  place(job, static_cast<float*>(args.scratch));
  job.group_scores = args.group_scores;
  job.score_stride = args.score_stride;
  for (job.query = 0; job.query < args.select.queries; ++job.query) {
    KVSWAP_RETURN_IF_ERROR(launch_query(kWhere, job, stream));
  }
  return Status::ok();
}

}  // namespace kvswap::cuda
