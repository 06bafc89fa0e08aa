#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend/fetcher.h"
#include "engine/backend/memory_backend.h"
#include "engine/plan.h"
#include "engine/step/adaptive_prefetch.h"
#include "engine/step/adaptive_top_k.h"
#include "io/layered_file.h"
#include "io/timeline.h"
#include "io/wait_policy.h"
#include "memory/arena.h"
#include "memory/ledger.h"
#include "methods/clusters/cluster_store.h"
#include "methods/selection/selector.h"
#include "methods/summary/summary_store.h"
#include "store/record_store.h"

namespace kvswap {

struct EngineCounters {
  uint64_t steps = 0;            // attend() calls that selected
  uint64_t sequences = 0;        // of the caller's, summed over steps
  uint64_t groups_attended = 0;  // selected groups (a head's own where it chooses), no sinks, tail
  uint64_t groups_loaded = 0;
  uint64_t groups_reloaded = 0;    // before a layer chose: what it attended last, of shared pages
  uint64_t groups_prefetched = 0;  // before a layer chose, with a prediction
  uint64_t records_sealed = 0;
  double select_seconds = 0;  // project, score, choose
  double plan_seconds = 0;    // page maps, merging, submitting
  double attend_seconds = 0;  // the attention kernel
  uint64_t refreshes = 0;     // of a layer and sequence: which tokens are retained was chosen anew
  double refresh_seconds = 0;
  uint64_t refresh_bytes_read = 0;
  uint64_t groups_recalled = 0;  // selected beside what is kept, for tokens that are not
  double append_seconds = 0;     // packing, summarising, handing to the writer
  uint64_t cluster_records_sealed = 0;
  uint64_t cluster_splits = 0;
  uint64_t cluster_splits_refused = 0;  // for lack of numbers
  uint64_t cluster_splits_forced = 0;   // of clusters that were read for what waited
  uint64_t cluster_records_read = 0;    // because too many tokens waited for their cluster
  double cluster_seconds = 0;           // tokens enter clusters, and these are packed anew
};

/// A crop() that was stopped when some layers may have been cropped to so many positions. Another
/// crop() ends it, reset() forgets it, and calls that need whole layers are refused.
struct UnfinishedCrop {
  int64_t positions = 0;
  Status cause;
};

/// What an engine is built of, in the order of building; freed in the reverse order.
///
/// The classes that make a step of it (Batch, Tail, Sealer, StepCoordinator, MemoryReservations)
/// hold a reference and own nothing of it.
struct EngineContext {
  EngineContext(const EngineOptions& given, int64_t stored_bytes, ParallelFor parallel)
      : plan(given, stored_bytes),
        parallel(std::move(parallel)),
        ledger(options.kv_memory_bytes),
        look_ahead(look_ahead_mode(this->options)),
        group_counts(this->options),
        adaptive_prefetch(this->options),
        patience(static_cast<double>(options.io_timeout_seconds)) {}
  /// Opens file, reader, store and space, of options that are valid. What has a size from the start
  /// is the caller's to charge, but for the timeline.
  static Result<std::unique_ptr<EngineContext>> open(const EngineOptions& given,
                                                     ParallelFor parallel);
  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

  /// A new file for the session's records.
  Result<std::unique_ptr<DataFile>> open_own_file();

  /// In memory, and on disk.
  int64_t record_bytes() const { return plan.record_bytes; }
  int64_t stored_bytes() const { return plan.stored_bytes; }
  /// Null where the layer does not choose clusters.
  ClusterStore* clusters_of(int64_t layer) const {
    return clusters != nullptr && clusters->has(layer) ? clusters : nullptr;
  }
  const ParallelFor* threads() const { return parallel ? &parallel : nullptr; }

  const Plan plan;  // before all that look at it
  const EngineOptions& options = plan.options;
  const RetentionPlan& retention = plan.retention;
  const ParallelFor parallel;
  Ledger ledger;
  EngineCounters counters;
  const LookAheadMode look_ahead;
  Status broken = Status::ok();  // of a device that lost its room: every call returns it
  std::optional<UnfinishedCrop> unfinished_crop;
  AdaptiveTopK group_counts;
  AdaptivePrefetch adaptive_prefetch;
  std::vector<std::string> fallbacks;
  WaitPolicy patience;                 // how long calls wait for the disk, and who may end that
  std::unique_ptr<Timeline> timeline;  // null: nothing is recorded
  std::unique_ptr<LayeredFile> file;
  std::unique_ptr<RecordStore> store;
  std::unique_ptr<MemoryBackend> space;
  std::unique_ptr<Selector> selector;
  ClusterStore* clusters = nullptr;  // the selector's, where it chooses clusters
  std::unique_ptr<Fetcher> fetcher;

 private:
  void stack(std::unique_ptr<DataFile> own);
  Result<std::unique_ptr<BlockReader>> open_reader_of_file();
  Status open_store(std::unique_ptr<Layout> layout);
  Status open_space();
};

}  // namespace kvswap
