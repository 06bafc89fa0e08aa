#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/calls.h"
#include "engine/exact_chunks.h"
#include "engine/given_worths.h"
#include "engine/layer_steps.h"
#include "engine/page_table.h"
#include "methods/selector.h"

namespace kvswap {

/// What the caller gives in the place of what the settings' method would find out. Not thread-safe.
class Given {
 public:
  Given(Calls& calls, EngineParts& parts, Batch& batch, LayerSteps& steps,
        const ExactChunks& exact_chunks, GivenWorths& worths, PageTable& table)
      : calls_(calls),
        parts_(parts),
        batch_(batch),
        steps_(steps),
        exact_chunks_(exact_chunks),
        worths_(worths),
        table_(table) {}

  /// Must take_scores() come before attend() of so many queries?
  bool needs_scores(int64_t layer, int64_t queries);
  /// With rows=given, for the layer's next look_ahead() or attend(): [parts, queries, groups], see
  /// Selector.
  Status take_scores(int64_t layer, const GivenScores& scores);
  /// With keeper=given, after each append(): what its tokens are worth.
  Status take_worth(int64_t layer, const GivenWorth& worth);
  /// The layer's next selection, and that of the prediction for it, [parts][groups]. The selector
  /// still runs, so that its cost is measured; see GroupChoice.
  Status take_choice(int64_t layer, std::vector<std::vector<int32_t>> groups,
                     std::vector<std::vector<int32_t>> predicted = {});
  /// What the layer's next step sees, of the tokens that its table holds: [parts][positions].
  Status take_tokens(int64_t layer, const std::vector<std::vector<int64_t>>& positions);
  /// Which positions count from now on, of all that are held: [batch, positions]; see
  /// kvswap::declare_held().
  Status take_validity(int64_t batch, int64_t positions, const bool* valid);

 private:
  Calls& calls_;
  EngineParts& parts_;
  Batch& batch_;
  LayerSteps& steps_;
  const ExactChunks& exact_chunks_;
  GivenWorths& worths_;
  PageTable& table_;
};

}  // namespace kvswap
