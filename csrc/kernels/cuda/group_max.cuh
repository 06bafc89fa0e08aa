#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/group_tile.cuh"

namespace kvswap::cuda {

/// The largest score of one group of a tile whose scores stand at gapped(token). NaN is more than
/// any.
__device__ inline float largest_of_group(const float* staged, int group, int group_tokens,
                                         int tokens) {
  const int first = group * group_tokens;
  const int last = first + group_tokens < tokens ? first + group_tokens : tokens;
  float largest = never();
  for (int token = first; token < last; ++token) {
    const float score = staged[gapped(token)];
    largest = fmaxf(largest, score != score ? always() : score);
  }
  return largest;
}

}  // namespace kvswap::cuda
