#include "engine/step/step_attention.h"

namespace kvswap {

float* StepAttention::log_sum_exp(int64_t queries) {
  log_sums_.resize(batch_.size() * context_.options.query_heads * queries);
  return context_.space->compute().log_sum_exps(log_sums_.data());
}

Status StepAttention::score(const PagedAttentionArgs& attended, int64_t numbers) {
  const EngineOptions& options = context_.options;
  pages_max_ = attended.pages_max;
  mean_.resize(batch_.size() * options.kv_heads * pages_max_ * options.group_tokens);
  square_.resize(numbers > 1 ? mean_.size() : 0);
  return context_.space->compute().weigh({.attention = attended,
                                          .mean = mean_.data(),
                                          .square = square_.empty() ? nullptr : square_.data()});
}

}  // namespace kvswap
