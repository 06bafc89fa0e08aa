#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "kernels/attention_mass.h"

namespace kvswap {

/// What a step's queries paid the tokens that they attended: of each KV head the mean over its
/// query heads and the queries. It takes Plan::step_mass_bytes() of each sequence. Not thread-safe.
class StepMass {
 public:
  StepMass(const EngineParts& parts, const Batch& batch) : parts_(parts), batch_(batch) {}

  /// Where the step's attention must leave its own, unless another asks for it too.
  float* log_sum_exp(int64_t queries);

  /// Afterwards, with the arguments of that attention; numbers: 1, or 2 with squares.
  Status weigh(const PagedAttentionArgs& attended, int64_t numbers = 1);

  /// [group_tokens]: of a page of the step's table, by its place there.
  const float* means(int64_t part, int64_t head, int64_t entry) const {
    return mean_.data() + first_slot(part, head, entry);
  }
  /// The same, of squares; null: they were not wanted.
  const float* squares(int64_t part, int64_t head, int64_t entry) const {
    return square_.empty() ? nullptr : square_.data() + first_slot(part, head, entry);
  }

 private:
  int64_t first_slot(int64_t part, int64_t head, int64_t entry) const {
    const EngineOptions& options = parts_.options;
    return ((part * options.kv_heads + head) * pages_max_ + entry) * options.group_tokens;
  }

  const EngineParts& parts_;
  const Batch& batch_;
  int64_t pages_max_ = 0;
  std::vector<float> log_sums_;  // [parts, query_heads, queries]
  std::vector<float> mean_;      // [parts, kv_heads, pages_max, group_tokens]
  std::vector<float> square_;    // the same, or empty
};

}  // namespace kvswap
