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

/// A block computes 8 values of one projected query: each of 32 slices of the dimensions has a
/// thread for each column. Grid: (columns / 8, queries, batch).
template <typename T>
__global__ void __launch_bounds__(kThreads) project_queries(BatchProjectQueryArgs args) {
  __shared__ float grouped[kDimsMax];  // query heads summed over each KV head
  __shared__ float sums[kSlices][kColumns];
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int slice = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t out = static_cast<int64_t>(blockIdx.x) * kColumns + column;
  const int64_t sequence = blockIdx.z;
  const int64_t part = sequence % args.heads_apart;
  const T* query = static_cast<const T*>(args.query) +
                   sequence / args.heads_apart * args.batch_stride +
                   part * args.heads * args.head_stride + blockIdx.y * args.query_stride;
  const int ratio = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
  const int head_dim = static_cast<int>(args.head_dim);
  const int64_t dims = args.kv_heads * args.head_dim;
  float sum = 0.0f;
  for (int64_t first = 0; first < dims; first += kDimsMax) {
    const int count = static_cast<int>(dims - first < kDimsMax ? dims - first : kDimsMax);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const int at = static_cast<int>(first) + i;
      const T* source = query + at / head_dim * ratio * args.head_stride + at % head_dim;
      float value = 0.0f;
      for (int h = 0; h < ratio; ++h) value += to_float(source[h * args.head_stride]);
      grouped[i] = value;
    }
    __syncthreads();
    if (out >= args.rank) continue;
    const float* factors = args.projection + (part * dims + first) * args.rank + out;
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
  args.projected[(sequence * args.queries + blockIdx.y) * args.rank + out] = total;
}

}  // namespace

Status project_query(const BatchProjectQueryArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("project_query", args.dtype));
  const Grid grid = {.x = ceil_div(args.rank, kColumns), .y = args.queries, .z = args.batch};
  return with_floating(args.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch("project_query", stream, grid, kThreads, project_queries<T>, args);
  });
}

}  // namespace kvswap::cuda
