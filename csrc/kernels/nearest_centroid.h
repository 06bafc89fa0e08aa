#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

inline constexpr int64_t kCentroidBlock = 16;  // centroids side by side

/// Keys, and the centroids that one is looked for among. All fp32.
struct NearestCentroidArgs {
  const float* keys = nullptr;  // [any, width]
  int64_t key_stride = 0;       // in elements; width is contiguous
  /// [tokens]: the keys' rows; null: the first `tokens` ones.
  const int64_t* tokens_at = nullptr;
  int64_t tokens = 0;
  const float* centroids = nullptr;  // [ceil(count / 16), width, 16]
  const uint8_t* shut = nullptr;     // [count]: not looked at where not 0; null: none
  int64_t count = 0;
  int64_t width = 0;
  int32_t* nearest = nullptr;  // [tokens] out: -1 where there is none
  float* squared = nullptr;    // [tokens] out: how far it is, infinite where there is none; or null
};

/// For each key the centroid with the smallest |key - centroid|^2, the lower of equal ones; -1
/// where all are shut, or all distances are infinite or no number.
///
/// A distance is summed dimension by dimension, product and sum rounded apart, centroids side by
/// side in the lanes: the same bits from every instruction set and any number of threads.
void nearest_centroid(const NearestCentroidArgs& args, const Execution& execution);

}  // namespace kvswap
