#pragma once

#include <span>
#include <vector>

#include "methods/retention/retention_policy.h"
#include "methods/summary/group_encoder.h"

namespace kvswap {

/// Tokens whose keys are shortest, all heads' taken as one (Devoto et al., 2024).
class KNorm final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {.name = "knorm",
                                          .source = "a test",
                                          .scored_by = ScoredBy::kKeys,
                                          .make = &make_retention<KNorm>};

  explicit KNorm(const RetentionOptions&) {}

  void score_keys(const GroupKeys& group, std::span<float> scores) const override {
    with_elements(group.keys.data, group.keys.dtype, [&](const auto* keys) {
      for (int64_t token = 0; token < group.tokens; ++token) {
        float square = 0;
        for (int64_t head = 0; head < group.kv_heads; ++head) {
          const auto* key = keys + head * group.keys.head_stride + token * group.keys.token_stride;
          for (int64_t i = 0; i < group.head_dim; ++i)
            square += to_float(key[i]) * to_float(key[i]);
        }
        scores[token] = 1 / (1 + square);
      }
    });
  }
};

}  // namespace kvswap
