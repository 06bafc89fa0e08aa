#include "engine/retention_plan.h"

#include <algorithm>
#include <cmath>

#include "methods/retention/retained_tokens.h"

namespace kvswap {
namespace {

std::shared_ptr<const RetentionPolicy> policy_of(const EngineOptions& apart,
                                                 const RetentionKind& kind) {
  if (!kind.keeps_tokens) return nullptr;
  return kind.make({.query_heads = apart.query_heads,
                    .pool = apart.keep_pool,
                    .variance_weight = apart.keep_variance,
                    .low_watermark = apart.keep_slack,
                    .ratio = apart.keep_ratio,
                    .preference_temperatures = apart.keep_preference,
                    .scoring_heads = apart.keep_heads});
}

int64_t pages_for(const EngineOptions& apart, int64_t tokens) {
  return (tokens + apart.group_tokens - 1) / apart.group_tokens;
}

/// Of a layer, whatever others have.
int64_t most_of_a_layer(const EngineOptions& apart, const RetentionPlan& plan) {
  if (!plan.has_layer_budgets) return apart.keep_tokens;
  const auto usual = static_cast<double>(apart.keep_tokens + apart.keep_window);
  const auto most = static_cast<int64_t>(std::floor(apart.keep_layer_most * usual));
  return std::clamp(most - apart.keep_window, apart.keep_tokens, apart.keep_tokens * apart.layers);
}

int64_t pages_of(const EngineOptions& apart, const RetentionPlan& plan) {
  if (!plan.kind.keeps_tokens) return 0;
  // Of each precision, and of each layer, the last page may be partly empty.
  return pages_for(apart, apart.keep_tokens) + (plan.has_float8 || plan.has_layer_budgets ? 1 : 0);
}

int64_t layer_pages_of(const EngineOptions& apart, const RetentionPlan& plan) {
  if (!plan.has_layer_budgets) return plan.pages;
  return std::min(pages_for(apart, plan.in_dtype_max), plan.pages * apart.layers);
}

int64_t numbers_of(const RetentionPlan& plan) {
  if (plan.pages == 0) return 0;
  return plan.kind.scored_by == ScoredBy::kUser ? 2 : plan.scores_attended ? 1 : 0;
}

int64_t step_numbers_of(const RetentionPlan& plan) {
  if (plan.pages == 0) return 0;
  if (plan.kind.scored_by == ScoredBy::kUser) return plan.tells_attention ? 1 : 0;
  if (plan.numbers_a_token != 1 && !plan.kind.retains_online) return 0;
  return plan.policy->needs_squares() ? 2 : 1;
}

int64_t bytes_of_group(const EngineOptions& apart, const RetentionPlan& plan) {
  if (plan.pages == 0) return 0;
  return plan.numbers_a_token * apart.group_tokens * int64_t{sizeof(float)} +
         (apart.group_tokens + 7) / 8;
}

}  // namespace

RetentionPlan::RetentionPlan(const EngineOptions& apart)
    : kind(*RetentionKind::find(apart.keeper)),
      policy(policy_of(apart, kind)),
      scores_attended(apart.keep_interval > 0 && kind.scored_by == ScoredBy::kAttention &&
                      apart.keep_scores == "attended"),
      scores_all_tokens(apart.keep_interval > 0 && apart.keep_scores == "disk"),
      tells_attention(apart.tells_attention && kind.scored_by == ScoredBy::kUser),
      shares_groups(apart.keep_share == "auto"),
      has_layer_budgets(kind.divides_layers || !apart.keep_layer_shares.empty()),
      has_float8(kind.retains_online && apart.keep_ratio != 1.0),
      float8_per_token(dtype_bytes(apart.dtype)),
      float8_a_room(apart.keep_count == "bytes" ? float8_per_token : 1),
      in_dtype_max(most_of_a_layer(apart, *this)),
      tokens_max(in_dtype_max * (has_float8 ? float8_a_room : 1)),
      pages(pages_of(apart, *this)),
      layer_pages(layer_pages_of(apart, *this)),
      entries(layer_pages * (has_float8 ? float8_a_room : 1)),
      numbers_a_token(numbers_of(*this)),
      step_numbers(step_numbers_of(*this)),
      bytes_per_group(bytes_of_group(apart, *this)) {}

int64_t RetentionPlan::refresh_bytes(int64_t groups, int64_t group_tokens) const {
  if (pages == 0 || groups == 0 || numbers_a_token == 1) return 0;
  return (groups * group_tokens + kMassUnit) * int64_t{sizeof(float)};
}

}  // namespace kvswap
