#pragma once

#include <cstdint>

#include "engine/account.h"
#include "engine/base_files.h"
#include "engine/batch.h"
#include "engine/calls.h"
#include "engine/editor.h"
#include "engine/layer_steps.h"
#include "engine/tail.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Fills an empty session that was opened over BaseFiles with what a saved one held, or one that it
/// is a fork of. Reads no record but those of a reuse buffer that it fills (load_reuse()).
///
/// Everything is checked against what the session is before it is used. After an error the session
/// holds a part of it, and is only to be destroyed. Not thread-safe.
class Loader {
 public:
  Loader(Calls& calls, EngineParts& parts, Batch& batch, Tail& tail, Editor& editor,
         Account& account, LayerSteps& steps)
      : calls_(calls),
        parts_(parts),
        batch_(batch),
        tail_(tail),
        editor_(editor),
        account_(account),
        steps_(steps) {}

  /// `shared`: of a fork, the summaries that it shares, whose session may go afterwards; null: they
  /// are among the tensors.
  Status load(const SavedCounts& counts, const SavedTensors& saved, Summaries* shared = nullptr);

 private:
  Status fill(const SavedCounts& counts, const SavedTensors& saved, Summaries* shared);
  Status check(const SavedCounts& counts, const SavedTensors& saved) const;
  Status load_validity(const SavedCounts& counts, const SavedTensors& saved);
  Result<SavedBytes> flags(const char* name, const SavedCounts& counts,
                           const SavedTensors& saved) const;
  Status load_projections(const SavedTensors& saved);
  Status make_cluster_room(const SavedCounts& counts, const SavedTensors& saved);
  Status load_summaries(const SavedCounts& counts, const SavedTensors& saved);
  Status share_summaries(int64_t groups, Summaries& shared);
  Status load_tables(const SavedCounts& counts, const SavedTensors& saved);
  Status load_exponents(const SavedCounts& counts, const SavedTensors& saved, SavedTables& tables);
  Status load_sinks(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);
  Status load_tail(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);

  Calls& calls_;
  EngineParts& parts_;
  Batch& batch_;
  Tail& tail_;
  Editor& editor_;
  Account& account_;
  LayerSteps& steps_;
};

}  // namespace kvswap
