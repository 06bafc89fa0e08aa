#pragma once

#include <span>
#include <vector>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// CAKE 4: tokens of high or changing attention, each query head for itself (8), with their
/// neighbours; more in layers whose attention is spread and changes.
class Cake final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {
      .name = "cake", .source = "CAKE 4", .divides_layers = true, .make = &make_retention<Cake>};

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
  /// 4.2: in proportion to what layers are preferred by. What a layer cannot take others have, each
  /// as many more.
  std::vector<int64_t> divide(std::span<const LayerPrompt> layers, int64_t total) const override;
  /// 4.1: dispersion^(1/t1) change^(1/t2) with the settings' t; 0 where nothing changes.
  double preference(const AttentionSpread& spread) const;

 private:
  RetentionOptions options_;
};

}  // namespace kvswap
