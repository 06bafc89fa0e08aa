#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// How badly the mean of a group's keys stands for them (ShadowKV 4.1): 1 minus the least cosine
/// between it and one of them, all heads' keys taken as one. 0..2; 0 where no token counts.
float key_outlier_score(const GroupKeys& group);

/// ShadowKV 4.1: a prompt's groups whose mean stands for their keys worst.
class KeyOutliers final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {.name = "outliers",
                                          .source = "ShadowKV 4.1",
                                          .scored_by = ScoredBy::kKeys,
                                          .keeps_whole_groups = true,
                                          .make = &make_retention<KeyOutliers>};

  explicit KeyOutliers(const RetentionOptions&) {}

  void score_keys(const GroupKeys& group, std::span<float> scores) const override {
    std::fill(scores.begin(), scores.end(), key_outlier_score(group));
  }
  std::vector<int32_t> select(const RetainArgs& args) const override {
    return by_any_score(args);  // a group of equal keys scores 0
  }
};

}  // namespace kvswap
