#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace kvswap::cuda {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kColumns = 8;  // of the projection, side by side: one sector of memory
inline constexpr int kSlices = kThreads / kColumns;
inline constexpr int kDimsMax = 2048;  // summed query values at once

/// What one row of the result is made of.
struct QueryRow {
  int64_t first_head = 0;  // of the query
  int64_t kv_head = 0;     // whose part of the projection comes first
  int ratio = 1;           // heads that are summed for each KV head
  int64_t dims = 0;
  int64_t out = 0;  // row of `projected`
};

__device__ inline QueryRow row_of(const BatchProjectQueryArgs& args, int64_t index) {
  const int64_t ratio = args.heads / args.kv_heads;
  if (args.projects == QueryHeads::kSummed) {
    return {.ratio = static_cast<int>(ratio),
            .dims = args.kv_heads * args.head_dim,
            .out = blockIdx.z * args.queries + index};
  }
  const int64_t head = index % args.heads;
  return {.first_head = head,
          .kv_head = head / ratio,
          .dims = args.head_dim,
          .out = blockIdx.z * args.queries * args.heads + index};
}

/// A block computes 8 values of one row of the result: each of 32 slices of the dimensions has a
/// thread for each column. Grid: (columns / 8, queries or queries * heads, batch).
template <typename T>
__global__ void __launch_bounds__(kThreads) project_queries(BatchProjectQueryArgs args) {
  __shared__ float grouped[kDimsMax];  // query heads summed over each KV head
  __shared__ float sums[kSlices][kColumns];
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int slice = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t out = static_cast<int64_t>(blockIdx.x) * kColumns + column;
  const int64_t part = blockIdx.z % args.heads_apart;
  const bool is_summed = args.projects == QueryHeads::kSummed;
  const QueryRow row = row_of(args, blockIdx.y);
  const int64_t number = is_summed ? blockIdx.y : blockIdx.y / args.heads;
  const T* query = static_cast<const T*>(args.query) +
                   blockIdx.z / args.heads_apart * args.batch_stride + number * args.query_stride +
                   (part * args.heads + row.first_head) * args.head_stride;
  const int head_dim = static_cast<int>(args.head_dim);
  const float* projection =
      args.projection + (part * args.kv_heads + row.kv_head) * args.head_dim * args.rank;
  float sum = 0.0f;
  for (int64_t first = 0; first < row.dims; first += kDimsMax) {
    const int count = static_cast<int>(row.dims - first < kDimsMax ? row.dims - first : kDimsMax);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const int at = static_cast<int>(first) + i;
      const T* source = query + at / head_dim * row.ratio * args.head_stride + at % head_dim;
      float value = 0.0f;
      for (int h = 0; h < row.ratio; ++h) value += to_float(source[h * args.head_stride]);
      grouped[i] = value;
    }
    __syncthreads();
    if (out >= args.rank) continue;
    const float* factors = projection + first * args.rank + out;
#pragma unroll 8
    for (int i = slice; i < count; i += kSlices) {
      sum = fmaf(grouped[i], factors[i * args.rank], sum);
    }
  }
  sums[slice][column] = sum;
  __syncthreads();
  if (slice != 0 || out >= args.rank) return;
  float total = 0.0f;
#pragma unroll
  for (int s = 0; s < kSlices; ++s) total += sums[s][column];
  args.projected[row.out * args.rank + out] = is_summed ? total : total * args.factor;
}

}  // namespace

Status project_query(const BatchProjectQueryArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("project_query", args.dtype));
  const int64_t rows =
      args.projects == QueryHeads::kEach ? args.queries * args.heads : args.queries;
  const Grid grid = {.x = ceil_div(args.rank, kColumns), .y = rows, .z = args.batch};
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch("project_query", stream, grid, kThreads, project_queries<T>, args);
  });
}

}  // namespace kvswap::cuda
