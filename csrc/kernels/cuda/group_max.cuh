#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/group_tile.cuh"

namespace kvswap::cuda {

/// The largest score of one group of a tile whose scores stand at gapped(token). NaN is less than
/// any, as a comparison has it.
__device__ inline float largest_of_group(const float* staged, int group, int group_tokens,
                                         int tokens) {
  const int first = group * group_tokens;
  const int last = first + group_tokens < tokens ? first + group_tokens : tokens;
  float largest = never();
  for (int token = first; token < last; ++token) {
    const int at = gapped(token);
    largest = staged[at] > largest ? staged[at] : largest;
  }
  return largest;
}

}  // namespace kvswap::cuda
