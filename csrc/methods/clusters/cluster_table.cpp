#include "methods/clusters/cluster_table.h"

#include <algorithm>

#include "kernels/nearest_centroid.h"

namespace kvswap {

namespace {

constexpr int64_t kScan = 64;  // tokens

/// Not by resize() alone: it would take more than was asked.
template <typename T>
void grow_to(std::vector<T>& values, int64_t count, T value) {
  values.reserve(count);
  values.resize(count, value);
}

}  // namespace

int64_t NumberPool::take() {
  if (free_ == 0) return count_++;
  const auto lowest = std::find(is_free_.begin(), is_free_.end(), true);
  *lowest = false;
  --free_;
  return lowest - is_free_.begin();
}

void NumberPool::set(int64_t count, const std::function<bool(int64_t number)>& is_used) {
  count_ = count;
  while (count_ > 0 && !is_used(count_ - 1)) --count_;
  std::fill(is_free_.begin(), is_free_.end(), false);
  free_ = 0;
  for (int64_t number = 0; number < count_; ++number) {
    if (is_used(number)) continue;
    is_free_[number] = true;
    ++free_;
  }
}

ClusterTable::ClusterTable(int64_t width, int64_t tokens_max, int64_t clusters_max)
    : width_(width), centroids_(0, width) {
  grow(tokens_max, clusters_max);
}

void ClusterTable::grow(int64_t tokens_max, int64_t clusters_max) {
  grow_to(place_, tokens_max, kInTail);
  centroids_.grow(clusters_max);
  grow_to(size_, clusters_max, 0);
  grow_to(counted_, clusters_max, 0);
  grow_to(variance_, clusters_max, 0.0);
  numbers_.grow(clusters_max);
}

int64_t ClusterTable::bytes(int64_t width, int64_t tokens_max, int64_t clusters_max) {
  const int64_t blocks = (clusters_max + kCentroidBlock - 1) / kCentroidBlock;
  const int64_t each = 2 * sizeof(int32_t) + sizeof(double);
  return tokens_max * int64_t{sizeof(int32_t)} +
         blocks * kCentroidBlock * width * int64_t{sizeof(float)} + clusters_max * each +
         NumberPool::bytes(clusters_max);
}

std::vector<int64_t> ClusterTable::members(int64_t cluster, int64_t end) const {
  std::vector<int64_t> found;
  found.reserve(size_[cluster] + 1);
  for (int64_t first = 0; first < end && std::ssize(found) < size_[cluster]; first += kScan) {
    const int32_t* place = place_.data() + first;
    const int64_t some = std::min(kScan, end - first);
    // Most have none: these are passed by in whole vectors.
    bool has_any = some < kScan;
    for (int64_t i = 0; i < kScan && some == kScan; ++i) has_any |= place[i] == cluster;
    for (int64_t i = 0; i < some && has_any; ++i) {
      if (place[i] == cluster) found.push_back(first + i);
    }
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
  ahead_.note_change(cluster);
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

void ClusterTable::hold(int64_t cluster, int64_t token) {
  place_[token] = static_cast<int32_t>(cluster);
  ++size_[cluster];
  ahead_.note_change(cluster);
}

void ClusterTable::truncate(int64_t tokens, const std::function<bool(int64_t cluster)>& is_named) {
  forget_ahead();
  for (size_t token = tokens; token < place_.size(); ++token) {
    const int32_t cluster = place_[token];
    place_[token] = kInTail;
    if (cluster < 0) continue;
    // Which of them were comparable is not known any more.
    counted_[cluster] = std::min(counted_[cluster], --size_[cluster]);
    if (size_[cluster] == 0) variance_[cluster] = 0;
  }
  numbers_.set(count(), [&](int64_t number) { return size_[number] > 0 || is_named(number); });
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
  ahead_.note_change(cluster);
}

OpenCentroids ClusterTable::below(int64_t size) const {
  return {.blocks = centroids_.data(),
          .size = this->size(),
          .counted = {counted_.data(), static_cast<size_t>(count())},
          .width = width_,
          .size_below = size};
}

int64_t ClusterTable::nearest(const KeyRows& keys, int64_t token, int64_t size_below) const {
  return ahead_.nearest(below(size_below), keys, token);
}

void ClusterTable::look_ahead(const KeyRows& keys, std::span<const int64_t> tokens,
                              int64_t size_below) {
  ahead_.look(below(size_below), keys, tokens);
}

}  // namespace kvswap
