#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/float8.cuh"
#include "kernels/cuda/read_only.cuh"

namespace kvswap::cuda {

/// PagedAttentionArgs and its plan, as the kernels want them.
struct AttentionJob {
  /// Without a plan: the work is not split.
  explicit AttentionJob(const PagedAttentionArgs& args)
      : query(args.query),
        query_batch_stride(args.query_batch_stride),
        query_head_stride(args.query_head_stride),
        query_token_stride(args.query_token_stride),
        output(args.output),
        log_sum_exp(args.log_sum_exp),
        pages(args.pages),
        masks(args.masks),
        positions(args.positions),
        page_counts(args.page_counts),
        query_positions(args.query_positions),
        exponents(args.exponents),
        pages_max(args.pages_max),
        page_head_elements(
            args.shape.kv_heads == 1 ? 0 : 2 * args.shape.group_tokens * args.shape.head_dim),
        table_heads(static_cast<int>(args.table_heads)),
        page_heads(static_cast<int>(args.shape.kv_heads)),
        kv_heads(static_cast<int>(args.kv_heads())),
        ratio(kv_heads == 0 ? 1 : static_cast<int>(args.heads / kv_heads)),
        queries(static_cast<int>(args.queries)),
        group_tokens(static_cast<int>(args.shape.group_tokens)),
        head_dim(static_cast<int>(args.shape.head_dim)),
        scale(args.scale),
        softcap(args.softcap),
        sinks(args.sinks) {}

  const void* query = nullptr;
  int64_t query_batch_stride = 0, query_head_stride = 0, query_token_stride = 0;
  void* output = nullptr;
  float* log_sum_exp = nullptr;
  const void* const* pages = nullptr;
  const uint64_t* masks = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* page_counts = nullptr;
  const int32_t* query_positions = nullptr;
  const int8_t* exponents = nullptr;
  float* partial_output = nullptr;       // [units, splits, tile_rows, head_dim]
  float* partial_log_sum_exp = nullptr;  // [units, splits, tile_rows]
  int64_t pages_max = 0;
  int64_t split_slots = 0;
  int64_t page_head_elements = 0;  // from one head to the next in a page; 0: a page holds one
  int splits = 1;
  int table_heads = 1;
  int page_heads = 1;
  int kv_heads = 1;
  int row_tiles = 1;
  int ratio = 1;
  int queries = 1;
  int group_tokens = 1;
  int head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  const float* sinks = nullptr;

  static constexpr float kLog2E = 1.4426950408889634f;

  /// A score from the sum of products.
  __device__ float score(float sum_of_products) const {
    const float score = sum_of_products * scale;
    return softcap > 0.0f ? softcap * tanhf(score / softcap) : score;
  }
  /// The same as a power of 2.
  __device__ float power_of_2(float sum_of_products) const {
    return score(sum_of_products) * kLog2E;
  }
  /// The sink of a head, likewise.
  __device__ float sink_power_of_2(int head) const { return sinks[head] * kLog2E; }
};

inline constexpr int32_t kUnseen = 0x7fffffff;  // no query stands at this position or after it

/// Which part of the work a block has. Grid: (splits, kv_heads * row_tiles, batch).
template <int kRows>
struct AttentionPlace {
  __device__ explicit AttentionPlace(const AttentionJob& job)
      : split(static_cast<int>(blockIdx.x)),
        kv_head(static_cast<int>(blockIdx.y) / job.row_tiles),
        tile(static_cast<int>(blockIdx.y) % job.row_tiles),
        sequence(blockIdx.z) {
    take_tile(job, tile);
  }

  /// From now on the part of another tile of query rows.
  __device__ void take_tile(const AttentionJob& job, int which) {
    tile = which;
    const int left = job.ratio * job.queries - tile * kRows;
    rows = left < kRows ? left : kRows;
  }

  __device__ int head_of(const AttentionJob& job, int row) const {
    return kv_head * job.ratio + (tile * kRows + row) / job.queries;
  }
  __device__ int query_of(const AttentionJob& job, int row) const {
    return (tile * kRows + row) % job.queries;
  }
  /// The last position that a row sees.
  __device__ int32_t position_of(const AttentionJob& job, int row) const {
    return job.query_positions[sequence] + query_of(job, row);
  }
  template <typename T>
  __device__ const T* query_row(const AttentionJob& job, int row) const {
    return static_cast<const T*>(job.query) + sequence * job.query_batch_stride +
           head_of(job, row) * job.query_head_stride + query_of(job, row) * job.query_token_stride;
  }
  __device__ int64_t unit(const AttentionJob& job) const {
    return (sequence * job.kv_heads + kv_head) * job.row_tiles + tile;
  }

  int split;
  int kv_head;
  int tile;
  int64_t sequence;
  int rows;  // of this tile
};

/// In which format pages stand: all in the model's dtype, or some in e4m3.
enum class PageFormat { kModel, kMixed };

/// Where the K rows of some token slots stand, and at which positions; kUnseen: not to be read.
template <PageFormat kFormat>
struct SlotStage {
  const char* rows[kStageSlots];
  int32_t positions[kStageSlots];
  /// Of K and V; kNotFloat8: the slot's page is of the model's dtype.
  int8_t exponents[2][kFormat == PageFormat::kMixed ? kStageSlots : 1];

  /// 16 bytes of a slot's row from element `at` on, or the bytes that stand for them in e4m3. To be
  /// decoded when all that is wanted has been asked for, so that a load waits for none before it.
  template <typename T>
  __device__ uint4 load(int slot, int side, int64_t at, bool is_there) const {
    uint4 held = make_uint4(0, 0, 0, 0);
    if constexpr (kFormat == PageFormat::kModel) {
      if (is_there) {
        held = load_read_only<uint4>(rows[slot] + at * static_cast<int64_t>(sizeof(T)));
      }
      return held;
    }
    const bool is_float8 = exponents[side][slot] != kNotFloat8;
    const bool is_whole = is_there && !is_float8;
    const char* source = rows[slot] + (is_float8 ? at : at * static_cast<int64_t>(sizeof(T)));
    // No register is the target of two loads: the second would wait for the first, though it be not
    // executed.
    if constexpr (sizeof(T) == 2) {
      if (is_there) {
        const auto low = load_read_only<uint2>(source);
        held.x = low.x;
        held.y = low.y;
      }
    } else {
      if (is_there) held.x = load_read_only<uint32_t>(source);
      if (is_whole) held.y = load_read_only<uint32_t>(source + 4);
    }
    if (is_whole) {
      const auto high = load_read_only<uint2>(source + 8);
      held.z = high.x;
      held.w = high.y;
    }
    return held;
  }

  /// What load() has brought, as elements of T.
  template <typename T>
  __device__ void decode(int slot, int side, uint4& held) const {
    if constexpr (kFormat == PageFormat::kMixed) {
      const int exponent = exponents[side][slot];
      if (exponent == kNotFloat8) return;
      if constexpr (sizeof(T) == 2) {
        held = decode_eight<T>(make_uint2(held.x, held.y), power_of_two(exponent));
      } else {
        const float4 values = decode_four(held.x, power_of_two(exponent));
        held = make_uint4(__float_as_uint(values.x), __float_as_uint(values.y),
                          __float_as_uint(values.z), __float_as_uint(values.w));
      }
    }
  }
};

/// Looks up slots [first, first + kStageSlots) of a page table for a SlotStage, all threads of a
/// block. What the table says of a slot is asked for together: find() waits for its page count
/// alone, and store() for the rest.
template <PageFormat kFormat>
struct SlotLookup {
  static constexpr int kOwn = kStageSlots / kAttentionThreads;  // slots of a thread

  template <int kRows>
  __device__ void find(const AttentionJob& job, const AttentionPlace<kRows>& place, int64_t first,
                       int64_t last) {
    const int64_t table =
        place.sequence * job.table_heads + (job.table_heads == 1 ? 0 : place.kv_head);
    const int32_t pages_here = job.page_counts[table];
    last_position = job.query_positions[place.sequence] + job.queries - 1;
    const auto group_tokens = static_cast<uint32_t>(job.group_tokens);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int64_t slot = first + own * kAttentionThreads + static_cast<int>(threadIdx.x);
      const int64_t page = static_cast<uint32_t>(slot) / group_tokens;
      const bool is_listed = slot < last && page < pages_here;
      const int64_t entry = is_listed ? table * job.pages_max + page : 0;
      mask[own] = is_listed ? job.masks[entry] : 0;
      position[own] = is_listed ? job.positions[entry] : 0;
      base[own] = is_listed ? static_cast<const char*>(job.pages[entry]) : nullptr;
      if constexpr (kFormat == PageFormat::kMixed) {
        const int64_t head = entry * job.page_heads + (job.page_heads == 1 ? 0 : place.kv_head);
        exponents[own][0] = is_listed ? job.exponents[head * 2] : kNotFloat8;
        exponents[own][1] = is_listed ? job.exponents[head * 2 + 1] : kNotFloat8;
      }
    }
  }

  /// Of the slots from `first` on that find() was called for.
  template <int kRows>
  __device__ void store(const AttentionJob& job, const AttentionPlace<kRows>& place, int64_t first,
                        int element_bytes, SlotStage<kFormat>& stage) const {
    const int64_t head_offset = place.kv_head * job.page_head_elements;
    const auto group_tokens = static_cast<uint32_t>(job.group_tokens);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int i = own * kAttentionThreads + static_cast<int>(threadIdx.x);
      const auto token = static_cast<int>(static_cast<uint32_t>(first + i) % group_tokens);
      const int32_t at = position[own] + token;
      const bool is_seen =
          (mask[own] >> token & 1) != 0 && base[own] != nullptr && at <= last_position;
      int bytes = element_bytes;
      if constexpr (kFormat == PageFormat::kMixed) {
        stage.exponents[0][i] = exponents[own][0];
        stage.exponents[1][i] = exponents[own][1];
        if (exponents[own][0] != kNotFloat8) bytes = 1;
      }
      stage.rows[i] =
          base[own] + (head_offset + static_cast<int64_t>(token) * job.head_dim) * bytes;
      stage.positions[i] = is_seen ? at : kUnseen;
    }
  }

  int32_t last_position;
  uint64_t mask[kOwn];
  int32_t position[kOwn];
  const char* base[kOwn];
  int8_t exponents[kOwn][2];
};

/// What the warps of a block leave behind for one row: maximum and sum, in powers of 2.
template <int kRows>
struct RowSums {
  float largest[kAttentionWarps][kRows];
  float sum[kAttentionWarps][kRows];

  __device__ float largest_of(int row) const {
    float result = never();
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) result = fmaxf(result, largest[w][row]);
    return result;
  }
  __device__ float total_of(int row, float all_largest) const {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      if (sum[w][row] != 0.0f) total += sum[w][row] * exp2f(largest[w][row] - all_largest);
    }
    return total;
  }
  /// What warp `warp` multiplies its unnormalised values with.
  __device__ float factor_of(int warp, int row) const {
    const float all_largest = largest_of(row);
    const float total = total_of(row, all_largest);
    if (total == 0.0f || sum[warp][row] == 0.0f) return 0.0f;
    return exp2f(largest[warp][row] - all_largest) / total;
  }
  __device__ float log_sum_exp_of(int row) const {
    const float all_largest = largest_of(row);
    const float total = total_of(row, all_largest);
    return total != 0.0f ? (all_largest + log2f(total)) * 0.6931471805599453f : never();
  }
};

/// The largest head_dim's values of a block's rows: a gap after each row spares bank conflicts.
template <int kRows, int kHeadDim>
struct RowValues {
  static constexpr int kStride = kHeadDim / 4 + 1;
  float4 values[kRows][kStride];
};

/// Writes four neighbouring elements of a row of the result, the `vector`-th four.
template <typename T, int kRows>
__device__ inline void write_output(const AttentionJob& job, const AttentionPlace<kRows>& place,
                                    int row, int vector, float4 value) {
  T* target =
      static_cast<T*>(job.output) +
      ((place.sequence * job.queries + place.query_of(job, row)) * job.ratio * job.kv_heads +
       place.head_of(job, row)) *
          job.head_dim +
      vector * 4;
  target[0] = from_float<T>(value.x);
  target[1] = from_float<T>(value.y);
  target[2] = from_float<T>(value.z);
  target[3] = from_float<T>(value.w);
}

/// Where a row's log-sum-exp stands in `log_sum_exp`.
template <int kRows>
__device__ inline int64_t log_sum_exp_index(const AttentionJob& job,
                                            const AttentionPlace<kRows>& place, int row) {
  return (place.sequence * job.ratio * job.kv_heads + place.head_of(job, row)) * job.queries +
         place.query_of(job, row);
}

/// Writes a block's normalised rows: to the result, or to the partial results of its split.
template <typename T, int kRows, int kHeadDim>
__device__ inline void write_rows(const AttentionJob& job, const AttentionPlace<kRows>& place,
                                  const RowValues<kRows, kHeadDim>& all,
                                  const RowSums<kRows>& sums) {
  const int vectors = job.head_dim / 4;
  const int64_t first_partial = (place.unit(job) * job.splits + place.split) * kRows;
  for (int i = static_cast<int>(threadIdx.x); i < place.rows * vectors; i += kAttentionThreads) {
    const int row = i / vectors;
    const float4 value = all.values[row][i % vectors];
    if (job.splits > 1) {
      float4* target = reinterpret_cast<float4*>(job.partial_output) +
                       (first_partial + row) * vectors + i % vectors;
      *target = value;
      continue;
    }
    write_output<T>(job, place, row, i % vectors, value);
  }
  const int row = static_cast<int>(threadIdx.x);
  if (row >= place.rows) return;
  if (job.splits > 1) {
    job.partial_log_sum_exp[first_partial + row] = sums.log_sum_exp_of(row);
  } else if (job.log_sum_exp != nullptr) {
    job.log_sum_exp[log_sum_exp_index(job, place, row)] = sums.log_sum_exp_of(row);
  }
}

}  // namespace kvswap::cuda
