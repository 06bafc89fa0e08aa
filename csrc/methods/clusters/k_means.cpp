#include "methods/clusters/k_means.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "kernels/nearest_centroid.h"

namespace kvswap {
namespace {

constexpr int kRounds = 6;
constexpr int kSplitRounds = 8;
constexpr double kNormMax = 1e16;  // above it sums of squares may leave fp32
constexpr int64_t kSums = 8;

/// Eight sums side by side, each in order, then added in order.
double squared_distance(const float* key, const double* from, int64_t width) {
  std::array<double, kSums> sums{};
  int64_t d = 0;
  for (; d + kSums <= width; d += kSums) {
    for (int64_t i = 0; i < kSums; ++i) {
      const double apart = key[d + i] - from[d + i];
      sums[i] += apart * apart;
    }
  }
  for (int64_t i = 0; d < width; ++d, ++i) {
    const double apart = key[d] - from[d];
    sums[i] += apart * apart;
  }
  double sum = 0;
  for (const double each : sums) sum += each;
  return sum;
}

std::vector<double> row_of(const KeyRows& keys, int64_t token) {
  return {keys.of(token), keys.of(token) + keys.width};
}

void add_to(std::vector<double>& sums, const float* key) {
  for (size_t d = 0; d < sums.size(); ++d) sums[d] += key[d];
}

std::vector<double> mean_of(const KeyRows& keys, std::span<const int64_t> tokens) {
  std::vector<double> mean(keys.width);
  for (const int64_t token : tokens) add_to(mean, keys.of(token));
  for (double& each : mean) each /= static_cast<double>(tokens.size());
  return mean;
}

/// Place in `tokens` of the key farthest from `from`, the first of equal ones.
int64_t farthest(const KeyRows& keys, std::span<const int64_t> tokens,
                 const std::vector<double>& from) {
  int64_t best = 0;
  double most = -1;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double apart = squared_distance(keys.of(tokens[i]), from.data(), keys.width);
    if (apart <= most) continue;
    most = apart;
    best = static_cast<int64_t>(i);
  }
  return best;
}

bool are_equal(const KeyRows& keys, int64_t one, int64_t other) {
  return std::equal(keys.of(one), keys.of(one) + keys.width, keys.of(other));
}

/// Lloyd's rounds over a block of tokens.
class Rounds {
 public:
  Rounds(const KeyRows& keys, std::span<const int64_t> tokens, int64_t count)
      : keys_(keys),
        tokens_(tokens),
        count_(count),
        centroids_(count, keys.width),
        label_(tokens.size()) {
    for (const int64_t token : tokens) rows_.push_back(token - keys.first);
    const auto n = static_cast<int64_t>(tokens.size());
    for (int64_t i = 0; i < count; ++i) {
      centroids_.set(i, row_of(keys, tokens[(2 * i + 1) * n / (2 * count)]));
    }
  }

  void run(const Execution& execution) {
    for (int round = 0; round < kRounds; ++round) {
      nearest_centroid({.keys = keys_.data,
                        .key_stride = keys_.stride,
                        .tokens_at = rows_.data(),
                        .tokens = static_cast<int64_t>(tokens_.size()),
                        .centroids = centroids_.data(),
                        .count = count_,
                        .width = keys_.width,
                        .nearest = label_.data()},
                       execution);
      fill_empty();
      move_centroids();
    }
  }

  /// Without the numbers of clusters that were left out.
  std::vector<int32_t> labels() const {
    std::vector<int32_t> number(count_);
    for (const int32_t label : label_) number[label] = 1;
    int32_t next = 0;
    for (int32_t& each : number) each = each > 0 ? next++ : -1;
    std::vector<int32_t> labels;
    for (const int32_t label : label_) labels.push_back(number[label]);
    return labels;
  }

 private:
  void fill_empty() {
    std::vector<int64_t> sizes(count_);
    for (const int32_t label : label_) ++sizes[label];
    for (int64_t empty = 0; empty < count_; ++empty) {
      if (sizes[empty] > 0) continue;
      const auto largest = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
      std::vector<int64_t> members, places;
      for (size_t i = 0; i < label_.size(); ++i) {
        if (label_[i] != largest) continue;
        members.push_back(tokens_[i]);
        places.push_back(static_cast<int64_t>(i));
      }
      const bool all_equal = std::all_of(members.begin(), members.end(), [&](int64_t token) {
        return are_equal(keys_, token, members.front());
      });
      if (all_equal) return;
      label_[places[farthest(keys_, members, mean_of(keys_, members))]] =
          static_cast<int32_t>(empty);
      --sizes[largest];
      sizes[empty] = 1;
    }
  }

  /// One that is empty stays where it is.
  void move_centroids() {
    std::vector<double> sums(count_ * keys_.width);
    std::vector<int64_t> sizes(count_);
    for (size_t i = 0; i < label_.size(); ++i) {
      double* sum = sums.data() + label_[i] * keys_.width;
      const float* key = keys_.of(tokens_[i]);
      for (int64_t d = 0; d < keys_.width; ++d) sum[d] += key[d];
      ++sizes[label_[i]];
    }
    for (int64_t c = 0; c < count_; ++c) {
      if (sizes[c] == 0) continue;
      const std::span row(sums.data() + c * keys_.width, static_cast<size_t>(keys_.width));
      for (double& each : row) each /= static_cast<double>(sizes[c]);
      centroids_.set(c, row);
    }
  }

  const KeyRows& keys_;
  std::span<const int64_t> tokens_;
  std::vector<int64_t> rows_;  // of keys_.data
  int64_t count_;
  CentroidBlocks centroids_;
  std::vector<int32_t> label_;
};

}  // namespace

CentroidBlocks::CentroidBlocks(int64_t count, int64_t width) : width_(width) { grow(count); }

void CentroidBlocks::grow(int64_t count) {
  const int64_t numbers = (count + kCentroidBlock - 1) / kCentroidBlock * kCentroidBlock * width_;
  // Not by resize() alone: it would take more than was asked.
  numbers_.reserve(numbers);
  numbers_.resize(numbers);
}

int64_t CentroidBlocks::first_of(int64_t centroid) const {
  return centroid / kCentroidBlock * kCentroidBlock * width_ + centroid % kCentroidBlock;
}

void CentroidBlocks::set(int64_t centroid, std::span<const double> row) {
  float* at = numbers_.data() + first_of(centroid);
  for (size_t d = 0; d < row.size(); ++d) at[d * kCentroidBlock] = static_cast<float>(row[d]);
}

void CentroidBlocks::get(int64_t centroid, std::span<float> row) const {
  const float* at = numbers_.data() + first_of(centroid);
  for (size_t d = 0; d < row.size(); ++d) row[d] = at[d * kCentroidBlock];
}

bool is_comparable(std::span<const float> key) {
  double squares = 0;
  for (const float each : key) squares += static_cast<double>(each) * each;
  return squares <= kNormMax * kNormMax;
}

MeanVariance mean_variance(const KeyRows& keys, std::span<const int64_t> tokens) {
  std::vector<int64_t> usual;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(usual), [&](int64_t token) {
    return is_comparable({keys.of(token), static_cast<size_t>(keys.width)});
  });
  if (usual.empty()) return {.mean = std::vector<double>(keys.width)};
  MeanVariance found{.mean = mean_of(keys, usual), .counted = static_cast<int64_t>(usual.size())};
  for (const int64_t token : usual) {
    found.variance += squared_distance(keys.of(token), found.mean.data(), keys.width);
  }
  found.variance /= static_cast<double>(found.counted);
  return found;
}

std::vector<int32_t> k_means(const KeyRows& keys, std::span<const int64_t> tokens, int64_t count,
                             const Execution& execution) {
  if (keys.source != nullptr) {
    std::vector<float> rows;
    for (const int64_t token : tokens) {
      rows.insert(rows.end(), keys.of(token), keys.of(token) + keys.width);
    }
    std::vector<int64_t> places(tokens.size());
    std::iota(places.begin(), places.end(), 0);
    return k_means({.data = rows.data(), .width = keys.width, .stride = keys.width}, places, count,
                   execution);
  }
  Rounds rounds(keys, tokens, count);
  rounds.run(execution);
  return rounds.labels();
}

std::vector<bool> split_in_two(const KeyRows& keys, std::span<const int64_t> tokens) {
  const int64_t one = tokens[farthest(keys, tokens, mean_of(keys, tokens))];
  std::vector<double> first = row_of(keys, one);
  const int64_t other = tokens[farthest(keys, tokens, first)];
  std::vector<double> second = row_of(keys, other);
  std::vector<bool> found(tokens.size());
  std::fill(found.begin() + (tokens.size() + 1) / 2, found.end(), true);
  if (are_equal(keys, one, other)) return found;
  for (int round = 0; round < kSplitRounds; ++round) {
    std::vector<bool> is_second(tokens.size());
    std::vector<int64_t> halves[2];
    for (size_t i = 0; i < tokens.size(); ++i) {
      const float* key = keys.of(tokens[i]);
      is_second[i] = squared_distance(key, second.data(), keys.width) <
                     squared_distance(key, first.data(), keys.width);
      halves[is_second[i]].push_back(tokens[i]);
    }
    if (halves[0].empty() || halves[1].empty() || is_second == found) break;
    found = is_second;
    first = mean_of(keys, halves[0]);
    second = mean_of(keys, halves[1]);
  }
  return found;
}

}  // namespace kvswap
