#include "methods/clusters/nearest_centroids.h"

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/nearest_centroid.h"

namespace kvswap {
namespace {

std::vector<uint8_t> shut_of(const OpenCentroids& among) {
  std::vector<uint8_t> shut(among.size.size());
  for (size_t c = 0; c < shut.size(); ++c) shut[c] = among.is_open(c) ? 0 : 1;
  return shut;
}

}  // namespace

void NearestCentroids::look(const OpenCentroids& among, const KeyRows& keys,
                            std::span<const int64_t> tokens) {
  forget();
  std::vector<float> rows;
  rows.reserve(tokens.size() * among.width);
  for (const int64_t token : tokens) {
    rows.insert(rows.end(), keys.of(token), keys.of(token) + among.width);
  }
  std::vector<int32_t> nearest(tokens.size());
  std::vector<float> squared(tokens.size());
  const std::vector<uint8_t> shut = shut_of(among);
  nearest_centroid({.keys = rows.data(),
                    .key_stride = among.width,
                    .tokens = std::ssize(tokens),
                    .centroids = among.blocks,
                    .shut = shut.data(),
                    .count = std::ssize(shut),
                    .width = among.width,
                    .nearest = nearest.data(),
                    .squared = squared.data()},
                   {});
  size_below_ = among.size_below;
  tokens_.assign(tokens.begin(), tokens.end());
  for (size_t i = 0; i < tokens.size(); ++i) found_.push_back({nearest[i], squared[i]});
}

void NearestCentroids::forget() {
  tokens_ = {};
  found_ = {};
  changed_ = {};
}

void NearestCentroids::note_change(int64_t cluster) {
  if (!tokens_.empty()) changed_.push_back(static_cast<int32_t>(cluster));
}

int64_t NearestCentroids::nearest(const OpenCentroids& among, const KeyRows& keys,
                                  int64_t token) const {
  const float* key = keys.of(token);
  const auto at = std::ranges::find(tokens_, token) - tokens_.begin();
  if (at == std::ssize(tokens_) || among.size_below != size_below_) {
    return among_all(among, key).cluster;
  }
  const Found before = found_[at];
  if (std::ranges::count(changed_, before.cluster) > 0) return among_all(among, key).cluster;
  const Found since = among_changed(among, key);
  if (before.cluster < 0) return since.cluster;
  const bool is_lower_of_equal = since.squared == before.squared && since.cluster < before.cluster;
  return since.squared < before.squared || is_lower_of_equal ? since.cluster : before.cluster;
}

NearestCentroids::Found NearestCentroids::among_all(const OpenCentroids& among, const float* key) {
  Found found;
  const std::vector<uint8_t> shut = shut_of(among);
  nearest_centroid({.keys = key,
                    .key_stride = among.width,
                    .tokens = 1,
                    .centroids = among.blocks,
                    .shut = shut.data(),
                    .count = std::ssize(shut),
                    .width = among.width,
                    .nearest = &found.cluster,
                    .squared = &found.squared},
                   {});
  return found;
}

NearestCentroids::Found NearestCentroids::among_changed(const OpenCentroids& among,
                                                        const float* key) const {
  Found best{.squared = std::numeric_limits<float>::infinity()};
  for (const int32_t cluster : changed_) {
    if (!among.is_open(cluster)) continue;
    const int64_t in_block = cluster % kCentroidBlock;
    const int64_t first = cluster - in_block;
    std::array<uint8_t, kCentroidBlock> shut;
    shut.fill(1);
    shut[in_block] = 0;
    Found found;
    nearest_centroid({.keys = key,
                      .key_stride = among.width,
                      .tokens = 1,
                      .centroids = among.blocks + first * among.width,
                      .shut = shut.data(),
                      .count = in_block + 1,
                      .width = among.width,
                      .nearest = &found.cluster,
                      .squared = &found.squared},
                     {});
    const bool is_lower_of_equal = found.squared == best.squared && cluster < best.cluster;
    if (found.squared < best.squared || is_lower_of_equal) best = {cluster, found.squared};
  }
  return best;
}

}  // namespace kvswap
