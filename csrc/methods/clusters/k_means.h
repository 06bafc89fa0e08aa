#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/types.h"

namespace kvswap {

/// A row's keys one by one, for who has them in several places.
class KeySource {
 public:
  virtual ~KeySource() = default;
  /// [width] of a token, fp32. Stands while the call that it was handed to runs.
  virtual const float* key(int64_t token) const = 0;
};

/// Keys of a row's tokens: a sequence's, all KV heads side by side, or those of one head. fp32.
struct KeyRows {
  const float* data = nullptr;  // [tokens, width], from token `first` on; null: in the source
  int64_t width = 0;
  int64_t stride = 0;  // in elements
  int64_t first = 0;
  const KeySource* source = nullptr;

  const float* of(int64_t token) const {
    return source != nullptr ? source->key(token) : data + (token - first) * stride;
  }
};

/// Centroids, 16 side by side: [ceil(count / 16), width, 16].
class CentroidBlocks {
 public:
  CentroidBlocks(int64_t count, int64_t width);
  /// Room for more, which are zero.
  void grow(int64_t count);

  const float* data() const { return numbers_.data(); }
  /// row: [width]
  void set(int64_t centroid, std::span<const double> row);
  void get(int64_t centroid, std::span<float> row) const;

 private:
  int64_t first_of(int64_t centroid) const;

  int64_t width_;
  std::vector<float> numbers_;
};

/// Is a distance to it a number? False for a NaN, an infinity, and where squares leave fp32.
bool is_comparable(std::span<const float> key);

struct MeanVariance {
  std::vector<double> mean;  // [width]
  double variance = 0;       // mean squared distance to it
  int64_t counted = 0;       // keys that are comparable: others count for neither
};

/// Of these tokens' keys. All 0 where none is comparable.
MeanVariance mean_variance(const KeyRows& keys, std::span<const int64_t> tokens);

/// Partitions keys by six of Lloyd's rounds: the label of each token, of 0 to the largest each once
/// at least.
///
/// Seed i is key floor((i + 1/2) n / count). A cluster that is left empty takes the key farthest
/// from its mean in the largest cluster; where all of that are equal it is left out. `tokens` are
/// all comparable, `count` is 1 to as many. Means are summed in fp64 in the order
/// of tokens, distances as nearest_centroid() says: the threads of `execution` and the CPU change
/// no bit.
std::vector<int32_t> k_means(const KeyRows& keys, std::span<const int64_t> tokens, int64_t count,
                             const Execution& execution);

/// Which of at least two comparable keys stand in the second half.
///
/// 2-means in fp64, eight rounds at most; seeds are the key farthest from the mean, and the one
/// farthest from that. Neither half is empty: keys that are all equal are parted in the middle.
std::vector<bool> split_in_two(const KeyRows& keys, std::span<const int64_t> tokens);

}  // namespace kvswap
