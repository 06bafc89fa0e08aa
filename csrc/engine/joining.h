#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/kept_pages.h"
#include "engine/step_mass.h"

namespace kvswap {

/// What keepers whose KeeperKind::joins do: what leaves the tail is kept before the next step, and
/// after a step behind which there is no room for it a share of those that are kept stays, by what
/// that step paid them. Nothing is read for it. Where KeepPlan::has_float8 the best of
/// them keep the model's dtype and the next become e4m3, as many as there is room for (ARKV IV-C;
/// keep_count says what of), which they stay until a prompt's turn. With other keepers nothing
/// lacks room. Not thread-safe.
class Joining {
 public:
  Joining(EngineParts& parts, Batch& batch, KeptPages& kept_pages)
      : parts_(parts), batch_(batch), kept_pages_(kept_pages) {}

  /// Will it be full once what is due has left the tail? Then the step is to be observed.
  bool lacks_room(int64_t layer, int64_t part) const;
  /// After each step: who will stay where there will be no room. `mass` weighs it where that is so.
  Status observe_step(int64_t layer, const PagedAttentionArgs& attended, StepMass& mass);

  /// Has something left the tail that had no chance to be kept?
  bool is_behind(int64_t layer, int64_t part) const;
  /// It is kept, where there is no room in the place of some that are.
  Status join(int64_t layer, int64_t part);
  /// After a prompt: who is kept by what the window's queries paid; what was decoded since stays.
  /// mass: [sealed tokens].
  Status turn_after_prompt(int64_t layer, int64_t part, std::span<const float> mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  std::vector<int32_t> newcomers(int64_t layer, int64_t part, int64_t begin, int64_t end) const;
  /// What kept tokens take of keep_tokens.
  int64_t room_of(size_t in_dtype, size_t in_float8) const;
  Status make_room(int64_t layer, int64_t part, std::span<const int32_t> fresh);
  double ratio(int64_t layer, int64_t part) const;
  void choose_who_stays(int64_t layer, int64_t part, const PagedAttentionArgs& attended,
                        const StepMass& mass);

  EngineParts& parts_;
  Batch& batch_;
  KeptPages& kept_pages_;
  std::vector<float> worth_;  // of the kept tokens of a part
};

}  // namespace kvswap
