#pragma once

#include <span>
#include <vector>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// CAKE 4: tokens of high or changing attention, each query head for itself (8), with their
/// neighbours; more in layers whose attention is spread and changes (4.1, 4.2).
class Cake final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {
      .name = "cake", .source = "CAKE 4", .prefers_layers = true, .make = &make_retention<Cake>};

  explicit Cake(const RetentionOptions& options) : options_(options) {}

  bool scores_query_heads() const override { return true; }
  bool needs_squares() const override { return true; }
  void add_scores(const HeadAttention& attention, const BlockScores& scores) const override {
    const auto weight = static_cast<float>(options_.variance_weight);
    for (size_t token = 0; token < attention.sums.size(); ++token) {
      const float mean = attention.sums[token] / static_cast<float>(attention.samples);
      scores[token] += mean + weight * sample_variance(attention, token);
    }
  }
  void smooth(std::span<float> scores) const override { pool_neighbours(scores, options_.pool); }
  double preference(const AttentionSpread& spread) const override {
    return spread.preference(options_.preference_temperatures);
  }

 private:
  RetentionOptions options_;
};

}  // namespace kvswap
