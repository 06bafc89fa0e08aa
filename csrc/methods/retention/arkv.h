#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// ARKV (9): a token's mean attention, and how much it varies, `variance` times.
inline float importance_of(float mean, float square, double variance) {
  return mean + static_cast<float>(variance) * std::max(0.0f, square - mean * mean);
}

/// ARKV (3)-(6): how unevenly a prompt's newest queries look at the tokens before them. Fed with
/// what attention each token received, in any unit.
class AttentionShape {
 public:
  void add(double received);
  /// H^(1/t1) V^(1/t2) Kurt^(1/t3) with these t; 0 of fewer than two tokens, and where all receive
  /// the same.
  double quality(std::span<const double> temperatures) const;

 private:
  double tokens_ = 0;
  double sum_ = 0;
  double logs_ = 0;  // sum of x ln x
  double squares_ = 0;
  double cubes_ = 0;
  double fourths_ = 0;
};

/// ARKV IV: tokens of high or varying attention (9), with their neighbours. Decoded ones join while
/// there is room; then a share stays by the attention of the newest step (IV-C), the best in the
/// model's dtype and the next in e4m3 (7).
class Arkv final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {
      .name = "arkv", .source = "ARKV IV", .retains_online = true, .make = &make_retention<Arkv>};

  explicit Arkv(const RetentionOptions& options) : options_(options) {}

  bool needs_squares() const override { return options_.variance_weight > 0; }
  void add_scores(const HeadAttention& attention, const BlockScores& scores) const override;
  void smooth(std::span<float> scores) const override { pool_neighbours(scores, options_.pool); }
  std::vector<int32_t> survivors(std::span<const int32_t> positions,
                                 std::span<const float> scores) const override;
  double share_in_dtype(std::optional<double> quality, double most) const override;

 private:
  RetentionOptions options_;
};

/// The `stay` best of retained tokens by the sum of what neighbours by position score, the best
/// first; ties to the lower one. positions: rising; pool: as pool_neighbours().
struct EvictArgs {
  std::span<const int32_t> positions;
  std::span<const float> importance;  // of each
  int64_t pool = 1;
  int64_t tokens = 0;  // that stay
};
std::vector<int32_t> retained_after_eviction(const EvictArgs& args);

}  // namespace kvswap
