#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/group_max.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace kvswap::cuda {
namespace {

inline constexpr int kMaxThreads = 256;

/// Grid: (tiles, rows folded into x as well: tile = x % tiles).
__global__ void __launch_bounds__(kMaxThreads)
    reduce_groups(BatchGroupMaxArgs args, int64_t row_groups, uint32_t tiles, int tile_tokens) {
  __shared__ float staged[kGappedTokensMax];
  const int64_t row = blockIdx.x / tiles;
  const int64_t first = int64_t{blockIdx.x % tiles} * tile_tokens;
  const int64_t left = args.tokens - first;
  const int tokens = static_cast<int>(left < tile_tokens ? left : tile_tokens);
  const float* source = args.scores + row * args.tokens + first;
#pragma unroll
  for (int i = 0; i < kTileTokensMax / kMaxThreads; ++i) {
    const int token = i * kMaxThreads + static_cast<int>(threadIdx.x);
    if (token < tokens) staged[gapped(token)] = source[token];
  }
  __syncthreads();
  const int group_tokens = static_cast<int>(args.group_tokens);
  float* target =
      args.group_scores + row * row_groups + blockIdx.x % tiles * (tile_tokens / group_tokens);
  const int groups = (tokens + group_tokens - 1) / group_tokens;
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kMaxThreads) {
    target[group] = largest_of_group(staged, group, group_tokens, tokens);
  }
}

}  // namespace

Status group_max(const BatchGroupMaxArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_range("group_max", "group_tokens", args.group_tokens, 1, 64));
  const int64_t tile_tokens = max_tile_tokens(args.group_tokens);
  const int64_t tiles = ceil_div(args.tokens, tile_tokens);
  return launch("group_max", stream, {.x = tiles * args.rows}, kMaxThreads, reduce_groups, args,
                ceil_div(args.tokens, args.group_tokens), static_cast<uint32_t>(tiles),
                static_cast<int>(tile_tokens));
}

}  // namespace kvswap::cuda
