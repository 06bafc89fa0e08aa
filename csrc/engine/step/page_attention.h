#pragma once

#include <cstdint>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/step/layer_step.h"
#include "engine/step/step_attention.h"

namespace kvswap {

/// With replacement = score: the attention that each page of a reuse buffer received when its group
/// was last attended, the mean over heads and queries; the page with the least is replaced first.
/// With other replacements it does nothing. Not thread-safe.
class PageAttention {
 public:
  PageAttention(EngineContext& context, const Batch& batch)
      : context_(context), batch_(batch), mass_(context, batch) {}

  /// Where a step's attention must leave its own, unless another asks for it too; null: not wanted.
  float* log_sum_exp(int64_t queries);
  /// Afterwards, with the arguments of that attention, before anything is sealed.
  Status rate(const LayerStep& step, int64_t layer, const PagedAttentionArgs& attended);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  EngineContext& context_;
  const Batch& batch_;
  StepAttention mass_;
};

}  // namespace kvswap
