#include "methods/cluster_table.h"

#include "kernels/nearest_centroid.h"

namespace kvswap {

ClusterTable::ClusterTable(int64_t width, int64_t tokens_max, int64_t clusters_max)
    : width_(width),
      place_(tokens_max, kInTail),
      centroids_(clusters_max, width),
      size_(clusters_max),
      counted_(clusters_max),
      variance_(clusters_max) {}

std::vector<int64_t> ClusterTable::members(int64_t cluster, int64_t end) const {
  std::vector<int64_t> found;
  found.reserve(size_[cluster] + 1);
  for (int64_t token = 0; token < end; ++token) {
    if (place_[token] == cluster) found.push_back(token);
  }
  return found;
}

void ClusterTable::set(int64_t cluster, const KeyRows& keys, std::span<const int64_t> tokens) {
  for (const int64_t token : tokens) place_[token] = static_cast<int32_t>(cluster);
  const MeanVariance found = mean_variance(keys, tokens);
  size_[cluster] = static_cast<int32_t>(tokens.size());
  counted_[cluster] = static_cast<int32_t>(found.counted);
  variance_[cluster] = found.variance;
  centroids_.set(cluster, found.mean);
}

MeanVariance ClusterTable::grown(int64_t cluster, const float* key) const {
  std::vector<float> row(width_);
  centroids_.get(cluster, row);
  const double size = counted_[cluster];
  MeanVariance found{.mean = std::vector<double>(width_), .counted = counted_[cluster] + 1};
  double added = 0;
  for (int64_t d = 0; d < width_; ++d) {
    const double step = static_cast<double>(key[d]) - row[d];
    found.mean[d] = row[d] + step / (size + 1);
    added += step * (key[d] - found.mean[d]);
  }
  found.variance = (size * variance_[cluster] + added) / (size + 1);
  return found;
}

double ClusterTable::variance_with(int64_t cluster, const float* key) const {
  return grown(cluster, key).variance;
}

void ClusterTable::join(int64_t cluster, const KeyRows& keys, int64_t token) {
  const MeanVariance found = grown(cluster, keys.of(token));
  place_[token] = static_cast<int32_t>(cluster);
  ++size_[cluster];
  ++counted_[cluster];
  variance_[cluster] = found.variance;
  centroids_.set(cluster, found.mean);
}

int64_t ClusterTable::nearest(const KeyRows& keys, int64_t token, int64_t size_below) const {
  std::vector<uint8_t> shut(count_);
  for (int64_t c = 0; c < count_; ++c) shut[c] = counted_[c] == 0 || size_[c] >= size_below;
  int32_t found = -1;
  nearest_centroid({.keys = keys.of(token),
                    .key_stride = keys.stride,
                    .tokens = 1,
                    .centroids = centroids_.data(),
                    .shut = shut.data(),
                    .count = count_,
                    .width = width_,
                    .nearest = &found},
                   {});
  return found;
}

}  // namespace kvswap
