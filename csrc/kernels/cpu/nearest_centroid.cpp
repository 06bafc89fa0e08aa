#include "kernels/nearest_centroid.h"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/nearest_centroid.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int64_t kVectors = kCentroidBlock / kLanes;
inline constexpr int64_t kKeys = 4;  // whose sums stand in registers together

const float* key_of(const NearestCentroidArgs& args, int64_t i) {
  return args.keys + (args.tokens_at ? args.tokens_at[i] : i) * args.key_stride;
}

/// squared: [Keys, 16] of one block of centroids.
template <int64_t Keys>
void distances(const NearestCentroidArgs& args, const float* const* keys, int64_t block,
               float* squared) {
  const float* centroid = args.centroids + block * args.width * kCentroidBlock;
  Floats sums[Keys][kVectors];
  KVSWAP_UNROLL
  for (int64_t k = 0; k < Keys; ++k) {
    KVSWAP_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) sums[k][v] = zeros();
  }
  for (int64_t d = 0; d < args.width; ++d, centroid += kCentroidBlock) {
    KVSWAP_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      const Floats at = load(centroid + v * kLanes);
      KVSWAP_UNROLL
      for (int64_t k = 0; k < Keys; ++k) {
        const Floats apart = add(at, fill(-keys[k][d]));
        sums[k][v] = add(sums[k][v], multiply(apart, apart));
      }
    }
  }
  KVSWAP_UNROLL
  for (int64_t k = 0; k < Keys; ++k) {
    KVSWAP_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      store(sums[k][v], squared + k * kCentroidBlock + v * kLanes);
    }
  }
}

template <int64_t Keys>
void find(const NearestCentroidArgs& args, int64_t first) {
  const float* keys[Keys];
  float best[Keys];
  for (int64_t k = 0; k < Keys; ++k) {
    keys[k] = key_of(args, first + k);
    best[k] = std::numeric_limits<float>::infinity();
    args.nearest[first + k] = -1;
  }
  float squared[Keys * kCentroidBlock];
  for (int64_t from = 0; from < args.count; from += kCentroidBlock) {
    distances<Keys>(args, keys, from / kCentroidBlock, squared);
    const int64_t end = std::min(from + kCentroidBlock, args.count);
    for (int64_t k = 0; k < Keys; ++k) {
      for (int64_t c = from; c < end; ++c) {
        const float apart = squared[k * kCentroidBlock + c - from];
        if (!(apart < best[k]) || (args.shut && args.shut[c])) continue;
        best[k] = apart;
        args.nearest[first + k] = static_cast<int32_t>(c);
      }
    }
  }
  if (args.squared != nullptr) std::copy_n(best, Keys, args.squared + first);
}

void find_range(const NearestCentroidArgs& args, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kKeys <= end; i += kKeys) find<kKeys>(args, i);
  for (; i < end; ++i) find<1>(args, i);
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(find_range);

void nearest_centroid(const NearestCentroidArgs& args, const Execution& execution) {
  run_parallel(execution, args.tokens, 64,
               [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(find_range)(args, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
