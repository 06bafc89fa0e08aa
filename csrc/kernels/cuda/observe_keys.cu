#include <cuda_runtime.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mass.cuh"

namespace kvswap::cuda {
namespace {

struct ObserveJob {
  MassQueries queries = {};
  const void* keys = nullptr;
  int64_t key_batch_stride = 0, key_head_stride = 0, key_token_stride = 0;
  const uint64_t* valid = nullptr;
  float* sums = nullptr;  // log-sum-exp out: [batch, heads, queries]
  float* mean = nullptr;
  float* square = nullptr;
  int64_t tokens = 0;

  __device__ bool is_valid(int64_t sequence, int64_t token) const {
    const int64_t words = (tokens + 63) / 64;
    return valid == nullptr || (valid[sequence * words + token / 64] >> token % 64 & 1) != 0;
  }
  template <typename T>
  __device__ const T* key(int64_t sequence, int64_t kv_head, int64_t token) const {
    return static_cast<const T*>(keys) + sequence * key_batch_stride + kv_head * key_head_stride +
           token * key_token_stride;
  }
  __device__ int64_t first_position() const { return tokens - queries.queries; }
};

/// A block sums the exponentials of one query; its warps take turns at the tokens and are joined in
/// their order. Grid: (queries, heads, batch).
template <typename T>
__global__ void __launch_bounds__(kMassThreads) sum_query(ObserveJob job) {
  __shared__ float largest_of[kMassWarps];
  __shared__ float sum_of[kMassWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t sequence = blockIdx.z;
  const int64_t head = blockIdx.y;
  const int64_t at = blockIdx.x;
  const MassKey own(job.queries.template row<T>(sequence, head, at), job.queries.head_dim, lane);
  float largest = never();
  float sum = 0.0f;
  for (int64_t token = warp; token <= job.first_position() + at; token += kMassWarps) {
    if (!job.is_valid(sequence, token)) continue;
    const T* key = job.template key<T>(sequence, head / job.queries.ratio, token);
    const float score = job.queries.score(own.product(key, job.queries.head_dim, lane));
    const float now = fmaxf(largest, score);
    sum = sum * (largest == never() ? 0.0f : expf(largest - now)) + expf(score - now);
    largest = now;
  }
  if (lane == 0) {
    largest_of[warp] = largest;
    sum_of[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < kMassWarps; ++w) largest = fmaxf(largest, largest_of[w]);
  float total = 0.0f;
  for (int w = 0; w < kMassWarps; ++w) {
    if (sum_of[w] > 0.0f) total += sum_of[w] * expf(largest_of[w] - largest);
  }
  job.sums[job.queries.place(sequence, head, at)] = total > 0.0f ? largest + logf(total) : never();
}

/// A warp has one key. Grid: (tokens / warps, kv_heads, batch).
template <typename T>
__global__ void __launch_bounds__(kMassThreads) weigh_tokens(ObserveJob job) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kMassWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= job.tokens) return;
  const int64_t sequence = blockIdx.z;
  const int64_t kv_head = blockIdx.y;
  float mean = 0.0f;
  float square = 0.0f;
  if (job.is_valid(sequence, token)) {
    const MassKey key(job.template key<T>(sequence, kv_head, token), job.queries.head_dim,
                      static_cast<int>(threadIdx.x) % 32);
    weigh_key<T>(job.queries, sequence, kv_head, key, token, job.first_position(), mean, square);
  }
  if (threadIdx.x % 32 != 0) return;
  const int64_t place = (sequence * job.queries.kv_heads + kv_head) * job.tokens + token;
  job.mean[place] = mean;
  if (job.square != nullptr) job.square[place] = square;
}

}  // namespace

int64_t observe_keys_scratch_bytes(const ObserveKeysArgs& args) {
  const int64_t sums = args.batch * args.heads * args.queries;
  return args.log_sum_exp == nullptr ? sums * static_cast<int64_t>(sizeof(float)) : 0;
}

Status observe_keys(const ObserveKeysArgs& args, void* scratch, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("observe_keys", args.dtype));
  KVSWAP_RETURN_IF_ERROR(check_range("observe_keys", "head_dim", args.head_dim, 1, kMassDimMax));
  ObserveJob job;
  job.sums = static_cast<float*>(scratch);
  job.queries = {.query = args.query,
                 .batch_stride = args.query_batch_stride,
                 .head_stride = args.query_head_stride,
                 .token_stride = args.query_token_stride,
                 .log_sum_exp = args.log_sum_exp == nullptr ? job.sums : args.log_sum_exp,
                 .ratio = static_cast<int>(args.heads / args.kv_heads),
                 .kv_heads = static_cast<int>(args.kv_heads),
                 .queries = static_cast<int>(args.queries),
                 .head_dim = static_cast<int>(args.head_dim),
                 .scale = args.scale,
                 .softcap = args.softcap};
  job.keys = args.keys;
  job.key_batch_stride = args.key_batch_stride;
  job.key_head_stride = args.key_head_stride;
  job.key_token_stride = args.key_token_stride;
  job.valid = args.valid;
  job.mean = args.mean;
  job.square = args.square;
  job.tokens = args.tokens;
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    if (args.log_sum_exp == nullptr) {
      const Grid sums = {.x = args.queries, .y = args.heads, .z = args.batch};
      const Status summed = launch("observe_keys", stream, sums, kMassThreads, sum_query<T>, job);
      if (!summed.is_ok()) return summed;
    }
    const Grid grid = {.x = ceil_div(args.tokens, kMassWarps), .y = args.kv_heads, .z = args.batch};
    return launch("observe_keys", stream, grid, kMassThreads, weigh_tokens<T>, job);
  });
}

}  // namespace kvswap::cuda
