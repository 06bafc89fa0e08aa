#include <cuda_runtime.h>

#include "kernels/cuda/float8.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mass.cuh"
#include "kernels/cuda/tensor_keys.cuh"

namespace kvswap::cuda {
namespace {

struct MassJob {
  AttentionJob of;
  float* mean = nullptr;
  float* square = nullptr;

  __device__ int64_t slots() const { return of.pages_max * of.group_tokens; }
  /// Of slot 0 in the result.
  __device__ int64_t first(int64_t sequence, int64_t kv_head) const {
    return (sequence * of.kv_heads + kv_head) * slots();
  }
  /// kNotFloat8: the page is of the model's dtype.
  __device__ int exponent(int64_t entry, int64_t kv_head) const {
    if (of.exponents == nullptr) return kNotFloat8;
    return of.exponents[(entry * of.page_heads + (of.page_heads == 1 ? 0 : kv_head)) * 2];
  }
};

/// A warp has one token slot. Grid: (slots / warps, kv_heads, batch). Of fp32, and of rows that are
/// no whole vectors.
template <typename T>
__global__ void __launch_bounds__(kMassThreads, 8) weigh_slots(MassJob job, MassQueries queries) {
  const int64_t slot =
      static_cast<int64_t>(blockIdx.x) * kMassWarps + static_cast<int>(threadIdx.x) / 32;
  if (slot >= job.slots()) return;
  const AttentionJob& of = job.of;
  const int64_t sequence = blockIdx.z;
  const int64_t kv_head = blockIdx.y;
  const int64_t table = sequence * of.table_heads + (of.table_heads == 1 ? 0 : kv_head);
  const int64_t page = slot / of.group_tokens;
  const int token = static_cast<int>(slot % of.group_tokens);
  const int64_t entry = table * of.pages_max + page;
  float mean = 0.0f;
  float square = 0.0f;
  if (page < of.page_counts[table] && (of.masks[entry] >> token & 1) != 0 &&
      of.pages[entry] != nullptr) {
    const int64_t at = kv_head * of.page_head_elements + static_cast<int64_t>(token) * of.head_dim;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int exponent = job.exponent(entry, kv_head);
    const MassKey key =
        exponent == kNotFloat8
            ? MassKey(static_cast<const T*>(of.pages[entry]) + at, of.head_dim, lane)
            : MassKey(static_cast<const Float8*>(of.pages[entry]) + at, of.head_dim, lane,
                      power_of_two(exponent));
    weigh_key<T>(queries, sequence, kv_head, key, of.positions[entry] + token,
                 of.query_positions[sequence], mean, square);
  }
  if (threadIdx.x % 32 != 0) return;
  const int64_t at = job.first(sequence, kv_head) + slot;
  job.mean[at] = mean;
  if (job.square != nullptr) job.square[at] = square;
}

/// The slots of one stage; a warp has sixteen of every 64, for one tile of query rows after the
/// other. Sums are taken in a fixed order.
template <typename T, int kChunks, PageFormat kFormat>
struct StageMass {
  using Keys = TensorKeys<T, kChunks, kFormat>;
  struct Shared : Keys::Shared {
    float mean[kStageSlots];
    float square[kStageSlots];
  };

  /// What one lane knows of its two rows of the tile: g and g + 8.
  struct SummaryEncoder {
    int32_t last_position[2];
    float log_sum_exp[2];

    __device__ SummaryEncoder(const AttentionJob& job, const AttentionPlace<kTensorRows>& place,
                              int g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = g + half * 8;
        const bool is_there = row < place.rows;
        log_sum_exp[half] =
            is_there ? job.log_sum_exp[log_sum_exp_index(job, place, row)] : never();
        last_position[half] =
            is_there && log_sum_exp[half] != never() ? place.position_of(job, row) : -1;
      }
    }
  };

  /// Adds the weights of sixteen tokens from stage slot `slot` on; the first tile sets them.
  __device__ static void add(const Keys& keys, const SummaryEncoder& rows, Shared& shared, int slot,
                             bool is_first) {
    float mean[4] = {};
    float square[4] = {};
    if (keys.is_any_seen(slot)) {
      uint4 held[2][Keys::kKeysHeld];
      keys.load_keys(slot, 0, held);
      float scores[2][4] = {};
      keys.score_all(slot, held, scores);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = shared.stage.positions[slot + i / 2 * 8 + 2 * keys.c + i % 2];
          if (position > rows.last_position[half]) continue;
          const float score = keys.job.score(scores[i / 2][half * 2 + i % 2]);
          const float weight = exp2f((score - rows.log_sum_exp[half]) * AttentionJob::kLog2E);
          mean[i] += weight;
          square[i] = fmaf(weight, weight, square[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) {
        mean[i] += __shfl_xor_sync(kWholeWarp, mean[i], bit);
        square[i] += __shfl_xor_sync(kWholeWarp, square[i], bit);
      }
      if (keys.g != 0) continue;
      const int at = slot + i / 2 * 8 + 2 * keys.c + i % 2;
      shared.mean[at] = is_first ? mean[i] : shared.mean[at] + mean[i];
      shared.square[at] = is_first ? square[i] : shared.square[at] + square[i];
    }
  }
};

/// Grid: (stages, kv_heads, batch).
template <typename T, int kChunks, PageFormat kFormat>
__global__ void __launch_bounds__(kAttentionThreads, 4) weigh_stages(MassJob job, int row_tiles) {
  using Stage = StageMass<T, kChunks, kFormat>;
  __shared__ typename Stage::Shared shared;
  AttentionPlace<kTensorRows> place(job.of);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStageSlots;
  const int64_t last = first + kStageSlots < job.slots() ? first + kStageSlots : job.slots();
  SlotLookup<kFormat> lookup;
  lookup.find(job.of, place, first, last);
  lookup.store(job.of, place, first, static_cast<int>(sizeof(T)), shared.stage);
  const typename Stage::Keys keys(job.of, place, shared);
  const int here = static_cast<int>(last - first);
  for (int tile = 0; tile < row_tiles; ++tile) {
    if (tile > 0) __syncthreads();  // nobody reads the rows of the tile before any more
    place.take_tile(job.of, tile);
    keys.stage_query();
    __syncthreads();
    const typename Stage::SummaryEncoder rows(job.of, place, keys.g);
    for (int slot = keys.warp * Stage::Keys::kTokens; slot < here;
         slot += kAttentionWarps * Stage::Keys::kTokens) {
      Stage::add(keys, rows, shared, slot, tile == 0);
    }
  }
  __syncthreads();
  const float rows = static_cast<float>(job.of.ratio * job.of.queries);
  const int64_t target = job.first(place.sequence, place.kv_head) + first;
  for (int i = static_cast<int>(threadIdx.x); i < here; i += kAttentionThreads) {
    job.mean[target + i] = shared.mean[i] / rows;
    if (job.square != nullptr) job.square[target + i] = shared.square[i] / rows;
  }
}

constexpr const char* kWhere = "attention_mass";

template <typename T>
Status weigh_by_slot(const MassJob& job, const PagedAttentionArgs& from, void* stream) {
  const MassQueries queries = {.query = from.query,
                               .batch_stride = from.query_batch_stride,
                               .head_stride = from.query_head_stride,
                               .token_stride = from.query_token_stride,
                               .log_sum_exp = from.log_sum_exp,
                               .ratio = job.of.ratio,
                               .kv_heads = job.of.kv_heads,
                               .queries = job.of.queries,
                               .head_dim = job.of.head_dim,
                               .scale = from.scale,
                               .softcap = from.softcap};
  const Grid grid = {.x = ceil_div(from.pages_max * from.shape.group_tokens, kMassWarps),
                     .y = from.kv_heads(),
                     .z = from.batch};
  return launch(kWhere, stream, grid, kMassThreads, weigh_slots<T>, job, queries);
}

template <typename T, PageFormat kFormat>
Status weigh_by_stage(const MassJob& job, const PagedAttentionArgs& from, void* stream) {
  const int64_t rows = static_cast<int64_t>(job.of.ratio) * job.of.queries;
  const Grid grid = {.x = ceil_div(from.pages_max * from.shape.group_tokens, kStageSlots),
                     .y = from.kv_heads(),
                     .z = from.batch};
  const auto kernel = job.of.head_dim <= 64    ? weigh_stages<T, 1, kFormat>
                      : job.of.head_dim <= 128 ? weigh_stages<T, 2, kFormat>
                                               : weigh_stages<T, 4, kFormat>;
  return launch(kWhere, stream, grid, kAttentionThreads, kernel, job,
                static_cast<int>(ceil_div(rows, kTensorRows)));
}

}  // namespace

Status attention_mass(const AttentionMassArgs& args, void* stream) {
  const PagedAttentionArgs& from = args.attention;
  KVSWAP_RETURN_IF_ERROR(check_floating(kWhere, from.dtype));
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "head_dim", from.shape.head_dim, 1, kMassDimMax));
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "token slots of a page table",
                                     from.pages_max * from.shape.group_tokens, 0, 2147483647));
  const MassJob job = {.of = AttentionJob(from), .mean = args.mean, .square = args.square};
  return with_floating(from.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    if constexpr (sizeof(T) == 2) {
      if (from.shape.head_dim % 8 == 0) {
        return from.exponents == nullptr ? weigh_by_stage<T, PageFormat::kModel>(job, from, stream)
                                         : weigh_by_stage<T, PageFormat::kMixed>(job, from, stream);
      }
    }
    return weigh_by_slot<T>(job, from, stream);
  });
}

}  // namespace kvswap::cuda
