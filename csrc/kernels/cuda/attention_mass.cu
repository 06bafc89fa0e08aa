#include <cuda_runtime.h>

#include "kernels/cuda/float8.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mass.cuh"

namespace kvswap::cuda {
namespace {

struct MassJob {
  MassQueries queries = {};
  const void* const* pages = nullptr;
  const uint64_t* masks = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* page_counts = nullptr;
  const int32_t* query_positions = nullptr;
  const int8_t* exponents = nullptr;  // null: all pages are of the model's dtype
  float* mean = nullptr;
  float* square = nullptr;
  int64_t slots = 0;  // pages_max * group_tokens
  int64_t pages_max = 0;
  int64_t page_head_elements = 0;  // from one head to the next in a page; 0: a page holds one
  int table_heads = 1;
  int page_heads = 1;
  int group_tokens = 1;

  /// kNotFloat8: the page is of the model's dtype.
  __device__ int exponent(int64_t entry, int64_t kv_head) const {
    if (exponents == nullptr) return kNotFloat8;
    return exponents[(entry * page_heads + (page_heads == 1 ? 0 : kv_head)) * 2];
  }
};

/// A warp has one token slot. Grid: (slots / warps, kv_heads, batch).
template <typename T>
__global__ void __launch_bounds__(kMassThreads, 8) weigh_slots(MassJob job) {
  const int64_t slot =
      static_cast<int64_t>(blockIdx.x) * kMassWarps + static_cast<int>(threadIdx.x) / 32;
  if (slot >= job.slots) return;
  const int64_t sequence = blockIdx.z;
  const int64_t kv_head = blockIdx.y;
  const int64_t table = sequence * job.table_heads + (job.table_heads == 1 ? 0 : kv_head);
  const int64_t page = slot / job.group_tokens;
  const int token = static_cast<int>(slot % job.group_tokens);
  const int64_t entry = table * job.pages_max + page;
  float mean = 0.0f;
  float square = 0.0f;
  if (page < job.page_counts[table] && (job.masks[entry] >> token & 1) != 0 &&
      job.pages[entry] != nullptr) {
    const int64_t at =
        kv_head * job.page_head_elements + static_cast<int64_t>(token) * job.queries.head_dim;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int exponent = job.exponent(entry, kv_head);
    const MassKey key =
        exponent == kNotFloat8
            ? MassKey(static_cast<const T*>(job.pages[entry]) + at, job.queries.head_dim, lane)
            : MassKey(static_cast<const Float8*>(job.pages[entry]) + at, job.queries.head_dim, lane,
                      power_of_two(exponent));
    weigh_key<T>(job.queries, sequence, kv_head, key, job.positions[entry] + token,
                 job.query_positions[sequence], mean, square);
  }
  if (threadIdx.x % 32 != 0) return;
  const int64_t at = (sequence * job.queries.kv_heads + kv_head) * job.slots + slot;
  job.mean[at] = mean;
  if (job.square != nullptr) job.square[at] = square;
}

}  // namespace

Status attention_mass(const AttentionMassArgs& args, void* stream) {
  const PagedAttentionArgs& from = args.attention;
  KVSWAP_RETURN_IF_ERROR(check_floating("attention_mass", from.dtype));
  KVSWAP_RETURN_IF_ERROR(
      check_range("attention_mass", "head_dim", from.shape.head_dim, 1, kMassDimMax));
  const int64_t kv_heads = from.kv_heads();
  MassJob job;
  job.queries = {.query = from.query,
                 .batch_stride = from.query_batch_stride,
                 .head_stride = from.query_head_stride,
                 .token_stride = from.query_token_stride,
                 .log_sum_exp = from.log_sum_exp,
                 .ratio = static_cast<int>(from.heads / kv_heads),
                 .kv_heads = static_cast<int>(kv_heads),
                 .queries = static_cast<int>(from.queries),
                 .head_dim = static_cast<int>(from.shape.head_dim),
                 .scale = from.scale,
                 .softcap = from.softcap};
  job.pages = from.pages;
  job.masks = from.masks;
  job.positions = from.positions;
  job.page_counts = from.page_counts;
  job.query_positions = from.query_positions;
  job.exponents = from.exponents;
  job.mean = args.mean;
  job.square = args.square;
  job.slots = from.pages_max * from.shape.group_tokens;
  job.pages_max = from.pages_max;
  job.page_head_elements =
      from.shape.kv_heads == 1 ? 0 : 2 * from.shape.group_tokens * from.shape.head_dim;
  job.table_heads = static_cast<int>(from.table_heads);
  job.page_heads = static_cast<int>(from.shape.kv_heads);
  job.group_tokens = static_cast<int>(from.shape.group_tokens);
  const Grid grid = {.x = ceil_div(job.slots, kMassWarps), .y = kv_heads, .z = from.batch};
  return with_floating(from.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch("attention_mass", stream, grid, kMassThreads, weigh_slots<T>, job);
  });
}

}  // namespace kvswap::cuda
