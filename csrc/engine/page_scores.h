#pragma once

#include <cstdint>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/layer_step.h"
#include "engine/step_mass.h"

namespace kvswap {

/// With replacement=score: what each page of a reuse buffer was paid when its group was last
/// attended, the mean over heads and queries, is what it leaves by. With others it does nothing.
/// Not thread-safe.
class PageScores {
 public:
  PageScores(EngineParts& parts, const Batch& batch)
      : parts_(parts), batch_(batch), mass_(parts, batch) {}

  /// Where a step's attention must leave its own, unless another asks for it too; null: not wanted.
  float* log_sum_exp(int64_t queries);
  /// Afterwards, with the arguments of that attention, before anything is sealed.
  Status rate(const LayerStep& step, int64_t layer, const PagedAttentionArgs& attended);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  EngineParts& parts_;
  const Batch& batch_;
  StepMass mass_;
};

}  // namespace kvswap
