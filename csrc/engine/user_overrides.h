#pragma once

#include <cstdint>
#include <vector>

#include "engine/call_guard.h"
#include "engine/prefill/chunked_prefill.h"
#include "engine/retention/user_token_scores.h"
#include "engine/sequence/batch.h"
#include "engine/step/page_table.h"
#include "engine/step/step_coordinator.h"
#include "methods/selection/selector.h"

namespace kvswap {

/// What the caller gives in the place of what the settings' method would find out. Not thread-safe.
class UserOverrides {
 public:
  UserOverrides(CallGuard& calls, EngineContext& context, Batch& batch, StepCoordinator& steps,
                const ChunkedPrefill& exact_chunks, UserTokenScores& importances, PageTable& table)
      : calls_(calls),
        context_(context),
        batch_(batch),
        steps_(steps),
        exact_chunks_(exact_chunks),
        importances_(importances),
        table_(table) {}

  /// Must take_scores() come before attend() of so many queries?
  bool needs_scores(int64_t layer, int64_t queries);
  /// With rows=given, for the layer's next look_ahead() or attend(): [sequences, queries, groups],
  /// see Selector.
  Status take_scores(int64_t layer, const UserScores& scores);
  /// With retention policy=given, after each append(): what its tokens score; or all, anew.
  Status set_token_importance(int64_t layer, const TokenScores& importance);
  /// The layer's next selection, and that of the prediction for it, [sequences][groups]. The
  /// selector still runs, so that its cost is measured; see GroupChoice.
  Status take_choice(int64_t layer, std::vector<std::vector<int32_t>> groups,
                     std::vector<std::vector<int32_t>> predicted = {});
  /// What the layer's next step sees, of the tokens that its table holds: [sequences][positions].
  Status take_tokens(int64_t layer, const std::vector<std::vector<int64_t>>& positions);
  /// Which positions count from now on, of all that are held: [batch, positions]; see
  /// kvswap::declare_held().
  Status take_validity(int64_t batch, int64_t positions, const bool* valid);

 private:
  CallGuard& calls_;
  EngineContext& context_;
  Batch& batch_;
  StepCoordinator& steps_;
  const ChunkedPrefill& exact_chunks_;
  UserTokenScores& importances_;
  PageTable& table_;
};

}  // namespace kvswap
