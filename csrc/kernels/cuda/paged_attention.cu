#include <cuda_runtime.h>

#include "kernels/cuda/attention_scalar.cuh"
#include "kernels/cuda/attention_tensor.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace kvswap::cuda {
namespace {

/// One split of one page table for one tile of query rows; warps take turns at its tokens.
template <typename Attention, int kRows, PageFormat kFormat>
__device__ void attend_split(const AttentionJob& job, int element_bytes) {
  __shared__ typename Attention::Shared shared;
  const AttentionPlace<kRows> place(job);
  Attention attention(job, place, shared);
  const int64_t first = place.split * job.split_slots;
  const int64_t slots = job.pages_max * job.group_tokens;
  const int64_t last = first + job.split_slots < slots ? first + job.split_slots : slots;
  constexpr int kTokens = Attention::kTokens;
  SlotLookup<kFormat> lookup;
  lookup.find(job, place, first, last);
  attention.stage_query();
  for (int64_t stage = first; stage < last; stage += kStageSlots) {
    lookup.store(job, place, stage, element_bytes, shared.stage);
    __syncthreads();
    const bool is_last = stage + kStageSlots >= last;
    // On its way while this stage is attended.
    if (!is_last) lookup.find(job, place, stage + kStageSlots, last);
    const int64_t left = last - stage;
    const int here = left < kStageSlots ? static_cast<int>(left) : kStageSlots;
    for (int slot = attention.token_warp * kTokens; slot < here;
         slot += Attention::kTokenWarps * kTokens) {
      attention.attend(slot);
    }
    if (!is_last) __syncthreads();  // nobody looks at this stage any more
  }
  attention.finish();
}

/// Blocks that must fit a multiprocessor: a cap on registers that still leaves enough for kChunks.
constexpr int tensor_blocks(int chunks) { return chunks == 1 ? 4 : 2; }

template <typename T, int kChunks, PageFormat kFormat>
__global__ void __launch_bounds__(kAttentionThreads, tensor_blocks(kChunks))
    attend_tensor(AttentionJob job) {
  attend_split<TensorAttention<T, kChunks, kFormat>, kTensorRows, kFormat>(job, 2);
}

/// Without the 2 the compiler aims at three blocks on sm_90, and spills a register to get there.
template <int kChunks, PageFormat kFormat>
__global__ void __launch_bounds__(kAttentionThreads, 2) attend_scalar(AttentionJob job) {
  attend_split<ScalarAttention<kChunks, kFormat>, kScalarRows, kFormat>(job, 4);
}

constexpr int kJoinParts = 4;  // threads that share the splits of the same values
constexpr int kJoinAhead = 8;  // splits that one thread has on their way
constexpr int kJoinColumns = kAttentionThreads / kJoinParts;

/// Joins the splits of one tile of rows. Grid: (parts of head_dim, kv_heads * row_tiles, batch);
/// four values of one row are the work of kJoinParts threads, each with every kJoinParts-th split,
/// whose sums are added in order: the same bits every time.
template <typename T, int kRows>
__global__ void __launch_bounds__(kAttentionThreads) join_splits(AttentionJob job) {
  __shared__ float weights[kSplitsMax][kRows];
  __shared__ float totals[kRows];
  __shared__ float4 sums_of_parts[kJoinParts][kJoinColumns];
  const AttentionPlace<kRows> place(job);
  const int64_t unit = place.unit(job);
  const float* sums = job.partial_log_sum_exp + unit * job.splits * kRows;
  for (int i = static_cast<int>(threadIdx.x); i < job.splits * kRows; i += kAttentionThreads) {
    weights[i / kRows][i % kRows] = i % kRows < place.rows ? sums[i] : never();
  }
  __syncthreads();
  constexpr int kTeam = kAttentionThreads / kRows;  // threads of a row: a part of a warp
  const int row = static_cast<int>(threadIdx.x) / kTeam;
  float largest = never();
  for (int s = static_cast<int>(threadIdx.x) % kTeam; s < job.splits; s += kTeam) {
    largest = fmaxf(largest, weights[s][row]);
  }
  for (int bit = 1; bit < kTeam; bit *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, bit));
  }
  float total = 0.0f;
  for (int s = static_cast<int>(threadIdx.x) % kTeam; s < job.splits; s += kTeam) {
    const float weight = weights[s][row] == never() ? 0.0f : expf(weights[s][row] - largest);
    weights[s][row] = weight;
    total += weight;
  }
  for (int bit = 1; bit < kTeam; bit *= 2) total += __shfl_xor_sync(kWholeWarp, total, bit);
  if (static_cast<int>(threadIdx.x) % kTeam == 0) totals[row] = total;
  __syncthreads();
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) % kTeam == 0 && row < place.rows &&
      job.log_sum_exp != nullptr) {
    job.log_sum_exp[log_sum_exp_index(job, place, row)] =
        total != 0.0f ? largest + logf(total) : never();
  }

  const int vectors = job.head_dim / 4;
  const int column = static_cast<int>(threadIdx.x) % kJoinColumns;
  const int own_part = static_cast<int>(threadIdx.x) / kJoinColumns;
  const int own = static_cast<int>(blockIdx.x) * kJoinColumns + column;
  const bool is_there = own < place.rows * vectors;
  const int own_row = is_there ? own / vectors : 0;
  const float4* source = reinterpret_cast<const float4*>(job.partial_output) +
                         (unit * job.splits * kRows + own_row) * vectors + own % vectors;
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int splits = is_there ? job.splits : 0;
#pragma unroll 1
  for (int first = own_part; first < splits; first += kJoinParts * kJoinAhead) {
    float weight[kJoinAhead];
    float4 part[kJoinAhead];  // all on their way before the first is added
#pragma unroll
    for (int i = 0; i < kJoinAhead; ++i) {
      const int split = first + i * kJoinParts;
      weight[i] = split < splits ? weights[split][own_row] : 0.0f;
      // A split that saw nothing has a weight of 0; what stands there is not a number of ours.
      part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (weight[i] != 0.0f) part[i] = source[static_cast<int64_t>(split) * kRows * vectors];
    }
#pragma unroll
    for (int i = 0; i < kJoinAhead; ++i) {
      value = make_float4(fmaf(weight[i], part[i].x, value.x), fmaf(weight[i], part[i].y, value.y),
                          fmaf(weight[i], part[i].z, value.z), fmaf(weight[i], part[i].w, value.w));
    }
  }
  sums_of_parts[own_part][column] = value;
  __syncthreads();
  if (own_part != 0 || !is_there) return;
#pragma unroll
  for (int other = 1; other < kJoinParts; ++other) {
    const float4 more = sums_of_parts[other][column];
    value = make_float4(value.x + more.x, value.y + more.y, value.z + more.z, value.w + more.w);
  }
  const float factor = totals[own_row] != 0.0f ? 1.0f / totals[own_row] : 0.0f;
  value = make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
  write_output<T>(job, place, own_row, own % vectors, value);
}

AttentionJob make_job(const PagedAttentionArgs& args, const AttentionPlan& plan, void* scratch) {
  AttentionJob job(args);
  job.partial_output = static_cast<float*>(scratch);
  job.partial_log_sum_exp = job.partial_output + plan.partial_rows(args) * args.shape.head_dim;
  job.split_slots = plan.split_slots;
  job.splits = static_cast<int>(plan.splits);
  job.row_tiles = static_cast<int>(plan.row_tiles);
  return job;
}

constexpr const char* kWhere = "paged_attention";

Status check(const PagedAttentionArgs& args) {
  KVSWAP_RETURN_IF_ERROR(check_floating(kWhere, args.dtype));
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "queries", args.queries, 1, kChunkQueriesMax));
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "group_tokens", args.shape.group_tokens, 1, 64));
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "token slots of a page table",
                                     args.pages_max * args.shape.group_tokens, 0, 2147483647));
  if (args.shape.head_dim % 8 != 0 || args.shape.head_dim < 8 || args.shape.head_dim > 256) {
    return Status::invalid(std::string(kWhere) +
                           ": head_dim must be a multiple of 8 up to 256 on CUDA, got " +
                           std::to_string(args.shape.head_dim));
  }
  return Status::ok();
}

template <typename T, PageFormat kFormat>
void (*pick_kernel(int64_t head_dim))(AttentionJob) {
  if constexpr (sizeof(T) == 4) {
    return head_dim <= 128 ? attend_scalar<1, kFormat> : attend_scalar<2, kFormat>;
  } else {
    return head_dim <= 64    ? attend_tensor<T, 1, kFormat>
           : head_dim <= 128 ? attend_tensor<T, 2, kFormat>
                             : attend_tensor<T, 4, kFormat>;
  }
}

}  // namespace

int64_t paged_attention_scratch_bytes(const PagedAttentionArgs& args) {
  const AttentionPlan plan(args);
  const int64_t floats = plan.partial_rows(args) * (args.shape.head_dim + 1);
  return floats * static_cast<int64_t>(sizeof(float));
}

Status paged_attention(const PagedAttentionArgs& args, void* scratch, void* stream) {
  if (args.batch == 0 || args.heads == 0) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(check(args));
  const AttentionPlan plan(args);
  const AttentionJob job = make_job(args, plan, scratch);
  const Grid grid = {.x = plan.splits, .y = plan.kv_heads * plan.row_tiles, .z = args.batch};
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    constexpr int kRows = sizeof(T) == 4 ? kScalarRows : kTensorRows;
    const auto kernel = args.exponents == nullptr
                            ? pick_kernel<T, PageFormat::kModel>(args.shape.head_dim)
                            : pick_kernel<T, PageFormat::kMixed>(args.shape.head_dim);
    KVSWAP_RETURN_IF_ERROR(launch(kWhere, stream, grid, kAttentionThreads, kernel, job));
    if (plan.splits == 1) return Status::ok();
    const int64_t rows = std::min<int64_t>(kRows, plan.ratio * args.queries);
    const Grid parts = {
        .x = ceil_div(rows * args.shape.head_dim / 4, kJoinColumns), .y = grid.y, .z = grid.z};
    return launch(kWhere, stream, parts, kAttentionThreads, join_splits<T, kRows>, job);
  });
}

}  // namespace kvswap::cuda
