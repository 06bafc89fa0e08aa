#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "kernels/attention_mass.h"

namespace kvswap {

/// The attention of a step's queries over the tokens that they attended: of each KV head the mean
/// over its query heads and the queries. It takes Plan::step_attention_bytes() of each sequence.
/// Not thread-safe.
class StepAttention {
 public:
  StepAttention(const EngineContext& context, const Batch& batch)
      : context_(context), batch_(batch) {}

  /// Where the step's attention must leave its own, unless another asks for it too.
  float* log_sum_exp(int64_t queries);

  /// Afterwards, with the arguments of that attention; numbers: 1, or 2 with squares.
  Status score(const PagedAttentionArgs& attended, int64_t numbers = 1);

  /// [group_tokens]: of a page of the step's table, by its place there.
  const float* means(int64_t sequence, int64_t head, int64_t entry) const {
    return mean_.data() + first_slot(sequence, head, entry);
  }
  /// The same, of squares; null: they were not wanted.
  const float* squares(int64_t sequence, int64_t head, int64_t entry) const {
    return square_.empty() ? nullptr : square_.data() + first_slot(sequence, head, entry);
  }

 private:
  int64_t first_slot(int64_t sequence, int64_t head, int64_t entry) const {
    const EngineOptions& options = context_.options;
    return ((sequence * options.kv_heads + head) * pages_max_ + entry) * options.group_tokens;
  }

  const EngineContext& context_;
  const Batch& batch_;
  int64_t pages_max_ = 0;
  std::vector<float> log_sums_;  // [sequences, query_heads, queries]
  std::vector<float> mean_;      // [sequences, kv_heads, pages_max, group_tokens]
  std::vector<float> square_;    // the same, or empty
};

}  // namespace kvswap
