#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "methods/clusters/k_means.h"
#include "methods/clusters/nearest_centroids.h"

namespace kvswap {

struct ClusterNumbers;

/// Where a token is that is in no cluster.
inline constexpr int32_t kInSinks = -3, kIsPending = -2, kInTail = -1;

/// Numbers of clusters: those below count() are of clusters, or free. Which clusters are empty is
/// for the table to say.
class NumberPool {
 public:
  void grow(int64_t most) { is_free_.resize(most, false); }
  static int64_t bytes(int64_t most) { return (most + 7) / 8; }

  int64_t count() const { return count_; }
  /// Without free ones.
  int64_t used() const { return count_ - free_; }
  /// That may still be taken.
  int64_t left() const { return std::ssize(is_free_) - used(); }
  /// The lowest that is free, else a new one.
  int64_t take();
  /// So many of them are used, or free where nothing uses them.
  void set(int64_t count, const std::function<bool(int64_t number)>& is_used);

 private:
  int64_t count_ = 0;
  int64_t free_ = 0;
  std::vector<bool> is_free_;  // [most]
};

/// The clusters of one row, a sequence or one KV head of it: who is in which, and of each its
/// centroid (fp32), size and variance. What a change is, not when one is due. Takes its memory at
/// construction, and when it grows. Not thread-safe.
class ClusterTable {
 public:
  ClusterTable(int64_t width, int64_t tokens_max, int64_t clusters_max);

  /// Room for more tokens and clusters.
  void grow(int64_t tokens_max, int64_t clusters_max);
  /// Of a table of that size.
  static int64_t bytes(int64_t width, int64_t tokens_max, int64_t clusters_max);

  int64_t width() const { return width_; }
  int64_t count() const { return numbers_.count(); }
  int64_t clusters_max() const { return static_cast<int64_t>(size_.size()); }
  const NumberPool& numbers() const { return numbers_; }
  /// [tokens_max]: a token's cluster, or where else it is.
  std::span<const int32_t> place() const { return place_; }
  /// [count]
  std::span<const int32_t> size() const { return {size_.data(), static_cast<size_t>(count())}; }
  std::span<const double> variance() const {
    return {variance_.data(), static_cast<size_t>(count())};
  }
  /// [count]: members that are comparable
  std::span<const int32_t> comparable() const {
    return {counted_.data(), static_cast<size_t>(count())};
  }
  /// [ceil(count / 16), width, 16]
  const float* centroids() const { return centroids_.data(); }
  /// Zero where no member is comparable.
  void centroid(int64_t cluster, std::span<float> row) const { centroids_.get(cluster, row); }
  /// Its tokens, rising, of those before `end`.
  std::vector<int64_t> members(int64_t cluster, int64_t end) const;

  /// For a token that is in no cluster.
  void put_outside(int64_t token, int32_t where) { place_[token] = where; }
  /// A number, of a cluster that is empty until it is set.
  int64_t add() { return numbers_.take(); }
  /// The cluster has these tokens now: centroid and variance are computed anew.
  void set(int64_t cluster, const KeyRows& keys, std::span<const int64_t> tokens);
  /// One comparable token more (DynaKV's UpdateVar).
  void join(int64_t cluster, const KeyRows& keys, int64_t token);
  /// One token more that is not comparable.
  void hold(int64_t cluster, int64_t token);
  /// Tokens from this one on are in no cluster any more. Centroids and variances of those that are
  /// not empty stay. Numbers of empty ones are free, except those that are still named elsewhere.
  void truncate(int64_t tokens, const std::function<bool(int64_t cluster)>& is_named);
  /// Variance that join() would leave.
  double variance_with(int64_t cluster, const float* key) const;
  /// The cluster with the nearest centroid of those with fewer tokens than `size_below`; -1: none
  /// has a centroid.
  int64_t nearest(const KeyRows& keys, int64_t token, int64_t size_below) const;
  /// Of several tokens at once, whatever becomes of clusters before they are asked for: nearest()
  /// answers the same as without, but looks only at the clusters that have changed since.
  void look_ahead(const KeyRows& keys, std::span<const int64_t> tokens, int64_t size_below);
  void forget_ahead() { ahead_.forget(); }

 private:
  friend struct ClusterNumbers;
  OpenCentroids below(int64_t size) const;
  /// Mean and variance with one more key.
  MeanVariance grown(int64_t cluster, const float* key) const;

  int64_t width_;
  NumberPool numbers_;
  std::vector<int32_t> place_;    // [tokens_max]
  CentroidBlocks centroids_;      // [clusters_max]
  std::vector<int32_t> size_;     // [clusters_max]
  std::vector<int32_t> counted_;  // [clusters_max]: comparable members
  std::vector<double> variance_;  // [clusters_max]
  NearestCentroids ahead_;
};

}  // namespace kvswap
