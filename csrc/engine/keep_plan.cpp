#include "engine/keep_plan.h"

namespace kvswap {
namespace {

int64_t pages_of(const EngineOptions& apart, const KeepPlan& plan) {
  if (!plan.kind.keeps_tokens) return 0;
  // Of each precision the last page may be partly empty.
  return (apart.keep_tokens + apart.group_tokens - 1) / apart.group_tokens +
         (plan.has_float8 ? 1 : 0);
}

}  // namespace

KeepPlan::KeepPlan(const EngineOptions& apart)
    : kind(apart.keeper_kind()),
      weighs_attended(apart.keep_interval > 0 && !kind.is_given && apart.keep_scores == "attended"),
      weighs_disk(apart.keep_interval > 0 && apart.keep_scores == "disk"),
      shares_groups(apart.keep_share == "auto"),
      has_float8(kind.joins && apart.keep_ratio != 1.0),
      float8_per_token(dtype_bytes(apart.dtype)),
      float8_a_room(apart.keep_count == "bytes" ? float8_per_token : 1),
      tokens_max(apart.keep_tokens * (has_float8 ? float8_a_room : 1)),
      pages(pages_of(apart, *this)),
      entries(pages * (has_float8 ? float8_a_room : 1)) {}

}  // namespace kvswap
