#pragma once

#include <vector>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// A layer's tokens, scored by a user's own rule.
struct TokenScores {
  enum class Of {
    kNewest,  // with each append
    kAll,     // in the place of what was given before
  };
  Of of = Of::kNewest;
  const float* importance = nullptr;  // [sequences, tokens]; -inf: never
  /// [sequences, tokens]: lost with each later token, of all tokens with each that is yet to come;
  /// null: nothing.
  const float* decay = nullptr;
  int64_t sequences = 0;
  int64_t tokens = 0;
};

/// Tokens with the largest scores of a user's own, which come with each append.
class UserRetention final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {.name = "given",
                                          .source = "",
                                          .scored_by = ScoredBy::kUser,
                                          .accumulates = true,
                                          .make = &make_retention<UserRetention>};

  explicit UserRetention(const RetentionOptions&) {}

  std::vector<int32_t> select(const RetainArgs& args) const override { return by_any_score(args); }
};

}  // namespace kvswap
