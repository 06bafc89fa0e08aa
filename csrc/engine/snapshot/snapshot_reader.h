#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/call_guard.h"
#include "engine/memory/memory_reservations.h"
#include "engine/sequence/batch.h"
#include "engine/sequence_editor.h"
#include "engine/snapshot/parent_files.h"
#include "engine/step/step_coordinator.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Fills an empty session that was opened over ParentFiles with what a saved one held, or one that
/// it continues. load() reads no record but those of a reuse buffer that it fills (load_reuse()).
///
/// Everything is checked against what the session is before it is used. After an error the session
/// holds a part of it, and is only to be destroyed. Not thread-safe.
class SnapshotReader {
 public:
  SnapshotReader(CallGuard& calls, EngineContext& context, Batch& batch, SequenceEditor& editor,
                 MemoryReservations& account, StepCoordinator& steps)
      : calls_(calls),
        context_(context),
        batch_(batch),
        editor_(editor),
        account_(account),
        steps_(steps) {}

  /// `shared`: of a fork, the summaries that it shares, whose session may go afterwards; null: they
  /// are among the tensors.
  Status load(const SavedCounts& counts, const SavedTensors& saved, SummaryStore* shared = nullptr);
  /// Of projections of saved_ranks each layer takes the part of its own rank, or none where that
  /// is more; its summary is made again from all of its records.
  Status load_narrower(const SavedCounts& counts, const SavedTensors& saved,
                       std::span<const int64_t> saved_ranks);

 private:
  /// All but projections and summaries. `summarise`: comes where there is room for them, before
  /// what it might be short of.
  Status fill(const SavedCounts& counts, const SavedTensors& saved,
              const std::function<Status()>& summarise);
  Status check(const SavedCounts& counts, const SavedTensors& saved) const;
  Status load_validity(const SavedCounts& counts, const SavedTensors& saved);
  Result<SavedBytes> flags(const char* name, const SavedCounts& counts,
                           const SavedTensors& saved) const;
  /// saved_ranks: one for each layer.
  Status load_projections(const SavedTensors& saved, std::span<const int64_t> saved_ranks);
  Status make_cluster_room(const SavedCounts& counts, const SavedTensors& saved);
  Status load_summaries(const SavedCounts& counts, const SavedTensors& saved);
  Status share_summaries(int64_t groups, SummaryStore& shared);
  Status load_tables(const SavedCounts& counts, const SavedTensors& saved);
  Status load_exponents(const SavedCounts& counts, const SavedTensors& saved, SavedTables& tables);
  Status load_sinks(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);
  Status load_tail(int64_t layer, const SavedCounts& counts, const SavedTensors& saved);

  CallGuard& calls_;
  EngineContext& context_;
  Batch& batch_;
  SequenceEditor& editor_;
  MemoryReservations& account_;
  StepCoordinator& steps_;
};

}  // namespace kvswap
