#include "methods/retention/arkv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "io/status.h"

namespace kvswap {

void Arkv::add_scores(const HeadAttention& attention, const BlockScores& scores) const {
  if (attention.squares.empty()) return RetentionPolicy::add_scores(attention, scores);
  const auto samples = static_cast<float>(attention.samples);
  for (size_t token = 0; token < attention.sums.size(); ++token) {
    scores[token] += importance_of(attention.sums[token] / samples,
                                   attention.squares[token] / samples, options_.variance_weight);
  }
}

std::vector<int32_t> Arkv::survivors(std::span<const int32_t> positions,
                                     std::span<const float> scores) const {
  const double stay = std::floor(options_.low_watermark * static_cast<double>(positions.size()));
  return retained_after_eviction({.positions = positions,
                                  .importance = scores,
                                  .pool = options_.pool,
                                  .tokens = static_cast<int64_t>(stay)});
}

double Arkv::share_in_dtype(std::optional<double> quality, double most) const {
  if (options_.ratio || !quality) return options_.ratio.value_or(1.0);
  return most > 0 ? *quality / most : 1.0;
}

std::vector<int32_t> retained_after_eviction(const EvictArgs& args) {
  const std::span<const int32_t> positions = args.positions;
  const auto count = static_cast<int64_t>(positions.size());
  std::vector<float> pooled(count, 0.0f);
  for (int64_t i = 0, first = 0; i < count; ++i) {
    while (positions[first] < positions[i] - (args.pool - 1) / 2) ++first;
    for (int64_t j = first; j < count && positions[j] <= positions[i] + args.pool / 2; ++j) {
      pooled[i] += args.importance[j];
    }
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return pooled[one] > pooled[other]; });
  std::vector<int32_t> stay;
  for (int64_t i = 0; i < std::min(count, args.tokens); ++i) stay.push_back(positions[order[i]]);
  return stay;
}

void AttentionShape::add(double received) {
  tokens_ += 1;
  if (!(received > 0)) return;
  const double square = received * received;
  sum_ += received;
  logs_ += received * std::log(received);
  squares_ += square;
  cubes_ += square * received;
  fourths_ += square * square;
}

double AttentionShape::quality(std::span<const double> temperatures) const {
  KVSWAP_ASSERT(temperatures.size() == 3);
  if (tokens_ < 2 || !(sum_ > 0)) return 0;
  // Of p = received / sum: its mean is 1 / tokens.
  const double entropy = std::log(sum_) - logs_ / sum_;
  const double mean = 1 / tokens_;
  const double square = squares_ / (sum_ * sum_) / tokens_;
  const double cube = cubes_ / (sum_ * sum_ * sum_) / tokens_;
  const double fourth = fourths_ / (sum_ * sum_ * sum_ * sum_) / tokens_;
  const double variance = square - mean * mean;
  const double central =
      fourth - 4 * mean * cube + 6 * mean * mean * square - 3 * mean * mean * mean * mean;
  if (!(entropy > 0) || !(variance > 1e-12 * square) || !(central > 0)) return 0;
  return std::pow(entropy, 1 / temperatures[0]) * std::pow(variance, 1 / temperatures[1]) *
         std::pow(central / (variance * variance), 1 / temperatures[2]);
}

}  // namespace kvswap
