#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "methods/clusters/k_means.h"

namespace kvswap {

/// Centroids to look among: those of clusters with comparable members and fewer tokens than
/// `size_below`.
struct OpenCentroids {
  const float* blocks = nullptr;     // [ceil(count / 16), width, 16]
  std::span<const int32_t> size;     // [count]: tokens
  std::span<const int32_t> counted;  // [count]: comparable ones of them
  int64_t width = 0;
  int64_t size_below = 0;

  bool is_open(int64_t cluster) const { return counted[cluster] > 0 && size[cluster] < size_below; }
};

/// The nearest centroids of tokens, looked for together before clusters change: a token that is
/// asked for later is compared with the changed ones alone. What it answers is what looking among
/// all would. Ties go to the lower number. Not thread-safe.
class NearestCentroids {
 public:
  /// Of these tokens, until forget().
  void look(const OpenCentroids& among, const KeyRows& keys, std::span<const int64_t> tokens);
  void forget();
  /// A cluster whose centroid or size is another than when it was looked for.
  void note_change(int64_t cluster);
  /// -1: no cluster is open.
  int64_t nearest(const OpenCentroids& among, const KeyRows& keys, int64_t token) const;

 private:
  struct Found {
    int32_t cluster = -1;
    float squared = 0;
  };
  static Found among_all(const OpenCentroids& among, const float* key);
  Found among_changed(const OpenCentroids& among, const float* key) const;

  int64_t size_below_ = 0;
  std::vector<int64_t> tokens_;
  std::vector<Found> found_;      // of each
  std::vector<int32_t> changed_;  // clusters, since then
};

}  // namespace kvswap
