#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/retention/retained_pages.h"
#include "engine/sequence/batch.h"
#include "engine/step/step_attention.h"

namespace kvswap {

/// Retains decoded tokens as they leave the tail, for policies with
/// RetentionKind::retains_online.
///
/// While there is room each of them is admitted. Behind a step that leaves no room a share of the
/// retained tokens stays, by the attention that this step gave them; nothing is read for it. With
/// RetentionPlan::has_float8 the best keep the model's dtype and the next are rounded to e4m3,
/// until the next refresh after a prompt; keep_count says what is counted. Of other policies no
/// layer is ever full. Not thread-safe. Source: ARKV IV-C.
class OnlineRetention {
 public:
  OnlineRetention(EngineContext& context, Batch& batch, RetainedPages& retained_pages)
      : context_(context), batch_(batch), retained_pages_(retained_pages) {}

  /// Will it be full once what is due has left the tail? Then the step is to be observed.
  bool is_full(int64_t layer, int64_t sequence) const;
  /// After each step: who will stay where there will be no room. `mass` weighs it where that is so.
  Status observe_step(int64_t layer, const PagedAttentionArgs& attended, StepAttention& mass);

  /// Has something left the tail that had no chance to be kept?
  bool needs_catch_up(int64_t layer, int64_t sequence) const;
  /// It is kept, where there is no room in the place of some that are.
  Status admit(int64_t layer, int64_t sequence);
  /// After a prompt: which tokens are retained by the attention of the window's queries; later
  /// tokens stay. mass: [sealed tokens].
  Status refresh_after_prompt(int64_t layer, int64_t sequence, std::span<const float> mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  std::vector<int32_t> newcomers(int64_t layer, int64_t sequence, int64_t begin, int64_t end) const;
  /// What retained tokens take of keep_tokens.
  int64_t room_of(size_t in_dtype, size_t in_float8) const;
  Status make_room(int64_t layer, int64_t sequence, std::span<const int32_t> fresh);
  double ratio(int64_t layer, int64_t sequence) const;
  void choose_survivors(int64_t layer, int64_t sequence, const PagedAttentionArgs& attended,
                        const StepAttention& mass);

  EngineContext& context_;
  Batch& batch_;
  RetainedPages& retained_pages_;
  std::vector<float> importance_;  // of the retained tokens of a sequence
};

}  // namespace kvswap
