#pragma once

#include <cstdint>

#include "engine/account.h"
#include "engine/base_files.h"
#include "engine/batch.h"
#include "engine/editor.h"
#include "engine/tail.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Fills a session that was opened over BaseFiles with what a saved one held. Reads no record.
///
/// Everything is checked against what the session is before it is used. After an error the session
/// holds a part of it, and is only to be destroyed. Not thread-safe.
class Loader {
 public:
  Loader(EngineParts& parts, Batch& batch, Tail& tail, Editor& editor, Account& account)
      : parts_(parts), batch_(batch), tail_(tail), editor_(editor), account_(account) {}

  /// `sharer`: who has the summaries, where they are shared; null: they are among the tensors.
  Status load(const SavedCounts& counts, const SavedTensors& saved, Summaries* sharer);

 private:
  Status check(const SavedCounts& counts, const SavedTensors& saved) const;
  Status load_validity(const SavedCounts& counts, const SavedTensors& saved);
  Status load_projections(const SavedTensors& saved);
  Status load_summaries(const SavedCounts& counts, const SavedTensors& saved);
  Status share_summaries(int64_t groups, Summaries& sharer);
  Status load_tables(const SavedCounts& counts, const SavedTensors& saved);
  Status load_exponents(const SavedCounts& counts, const SavedTensors& saved, SavedTables& tables);
  Status load_sinks(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);
  Status load_tail(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);

  EngineParts& parts_;
  Batch& batch_;
  Tail& tail_;
  Editor& editor_;
  Account& account_;
};

}  // namespace kvswap
