#include "engine/step_mass.h"

namespace kvswap {

int64_t StepMass::sequence_bytes(const EngineOptions& apart, Numbers numbers) {
  const int64_t copies = numbers == Numbers::kMeansAndSquares ? 2 : 1;
  return int64_t{sizeof(float)} *
         (apart.query_heads * apart.select_queries_max +
          copies * apart.kv_heads * pages_per_layer(apart) * apart.group_tokens);
}

float* StepMass::log_sum_exp(int64_t queries) {
  log_sums_.resize(batch_.size() * parts_.options.query_heads * queries);
  return parts_.space->compute().log_sum_exps(log_sums_.data());
}

Status StepMass::weigh(const PagedAttentionArgs& attended, Numbers numbers) {
  const EngineOptions& options = parts_.options;
  pages_max_ = attended.pages_max;
  mean_.resize(batch_.size() * options.kv_heads * pages_max_ * options.group_tokens);
  square_.resize(numbers == Numbers::kMeansAndSquares ? mean_.size() : 0);
  return parts_.space->compute().weigh({.attention = attended,
                                        .mean = mean_.data(),
                                        .square = square_.empty() ? nullptr : square_.data()});
}

}  // namespace kvswap
