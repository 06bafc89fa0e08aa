#pragma once

#include <algorithm>
#include <span>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// SnapKV 4: tokens that a prompt's newest queries attended most, each with its neighbours. Chosen
/// again while decoding it is PRKV's static set (3.4); with some heads alone CompressKV's (3.2).
class SnapKv final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {
      .name = "observed", .source = "SnapKV 4, PRKV 3.4", .make = &make_retention<SnapKv>};

  explicit SnapKv(const RetentionOptions& options) : options_(options) {}

  bool scores_query_heads() const override { return !options_.scoring_heads.empty(); }
  void add_scores(const HeadAttention& attention, const BlockScores& scores) const override {
    const std::vector<int64_t>& heads = options_.scoring_heads;
    const int64_t number = attention.layer * options_.query_heads + attention.head;
    if (!heads.empty() && !std::binary_search(heads.begin(), heads.end(), number)) return;
    RetentionPolicy::add_scores(attention, scores);
  }
  void smooth(std::span<float> scores) const override { pool_neighbours(scores, options_.pool); }

 private:
  RetentionOptions options_;
};

}  // namespace kvswap
