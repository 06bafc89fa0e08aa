#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/appender.h"
#include "engine/call_guard.h"
#include "engine/clusters/cluster_updater.h"
#include "engine/engine_context.h"
#include "engine/memory/memory_reservations.h"
#include "engine/prefill/chunked_prefill.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/retention/retention_manager.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/sequence/tail.h"
#include "engine/sequence_editor.h"
#include "engine/snapshot/snapshot_reader.h"
#include "engine/snapshot/snapshot_writer.h"
#include "engine/step/page_attention.h"
#include "engine/step/page_table.h"
#include "engine/step/recall_audit.h"
#include "engine/step/step_coordinator.h"
#include "engine/user_overrides.h"

namespace kvswap {

struct AttendArgs {
  int64_t layer = 0;
  QueryView query;         // all heads
  void* output = nullptr;  // [batch, queries, heads, value_width()] contiguous
  float scale = 1.0f;
  float softcap = 0.0f;          // as PagedAttentionArgs
  const float* sinks = nullptr;  // [heads], where the pages are
  float* received = nullptr;     // [batch, kv_heads, positions] out; null: not wanted
};

/// One generation's KV cache on raw pointers: score -> select -> plan -> read -> attend.
///
/// The torch-free heart: checks who calls and in which order, and leaves the work to its parts.
/// csrc/kvswap/cache.h is its public face and documents the order of calls. Everything is
/// allocated when the batch is known and charged to the ledger before.
///
/// Callers' sequences and logical ones are the same, except with heads=each: then each KV head of a
/// sequence is a logical sequence, `heads_apart` of them a caller's. Here the two meet; below the
/// engine's face every `sequence` is a logical one.
///
/// A Status that is_pending() (the disk hangs, or the call was asked to end) leaves everything as
/// it was, reads in flight included. The second reading of a crop() does not: see there. The same
/// call may be made again. The destructor waits for what is in flight.
///
/// Thread rules: one thread at a time; kernels use the given ParallelFor.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options, ParallelFor parallel);
  ~Engine();

  /// What the next calls belong to; until it is said, and after reset(), a prefill.
  Status begin_pass(Pass pass);
  /// Validity of the next positions: [batch, tokens], true where the token counts.
  Status declare(int64_t batch, int64_t tokens, const bool* valid);
  /// append() is all or nothing. A background write that failed is kept and tried again by the
  /// calls that need it; crop() and reset() drop what nobody will read.
  Status append(int64_t layer, const KeyValueView& tokens);
  /// Chooses, plans and submits what `layer` will need; see Cache::look_ahead(). On a device
  /// selection is asynchronous: the next call completes it, and attend() returns its errors.
  /// scale: what attend() will be given; none: 1 / sqrt(head_dim). Only a score by mass uses it.
  /// since_ns: when the prediction began, of the timeline's clock; 0: with the call.
  Status look_ahead(int64_t layer, const QueryView& query, std::optional<float> scale = {},
                    int64_t since_ns = 0);
  /// Attention of the last query.queries positions over sinks, chosen groups and tail, then seals
  /// what has left the tail. Of a decode pass, but for what ChunkedPrefill takes.
  Status attend(const AttendArgs& args);

  /// Copies positions [begin, end) of one sequence to arrays of the host, [kv_heads, end - begin,
  /// head_dim] and [kv_heads, end - begin, value_width()].
  Status read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                   void* values);
  bool needs_projection(int64_t layer) const;
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);
  Status select_sequences(std::span<const int64_t> indices);
  /// That every record that a summary is made from can be read.
  Status read_all();
  /// All or nothing, unless what returns to the tail was read once, and the second reading fails or
  /// is ended: until crop() is called again, to as many positions or fewer, or reset(), all calls
  /// that compute, save or change anything are refused.
  Status crop(int64_t positions);
  Status reset();

  // What a step does not need, each with calls of its own.
  SnapshotWriter& saver() { return saver_; }
  SnapshotReader& loader() { return loader_; }
  UserOverrides& given() { return given_; }
  ChunkedPrefill& exact_chunks() { return exact_chunks_; }
  /// Who stays because of the attention received: asked, and given what it observes, by who attends
  /// exactly.
  RetentionManager& retention() { return retention_; }
  WaitPolicy& patience() { return context_->patience; }

  const EngineContext& context() const { return *context_; }
  const EngineOptions& options() const { return options_; }  // as they were given
  const RecallAudit& audit() const { return audit_; }
  int64_t batch() const { return batch_->size() / context_->options.heads_apart; }
  int64_t positions(int64_t layer) const { return batch_->layer(layer).positions; }
  /// The logical sequences: what their layers hold, and which of their positions count.
  const Batch& sequences() const { return *batch_; }
  /// [sequences][groups]
  const std::vector<std::vector<int32_t>>& last_selection(int64_t layer);

 private:
  Engine(const EngineOptions& options, std::unique_ptr<EngineContext> context);

  const EngineOptions options_;
  std::unique_ptr<EngineContext> context_;
  MemoryReservations account_;
  std::unique_ptr<Batch> batch_;
  Sealer sealer_;
  std::unique_ptr<PrefixReader> past_;
  StepCoordinator steps_;
  CallGuard calls_;
  ClusterUpdater clustering_;
  Appender appender_;
  SequenceEditor editor_;
  SnapshotWriter saver_;
  SnapshotReader loader_;
  PageTable table_;
  RecallAudit audit_;
  RetentionManager retention_;
  ChunkedPrefill exact_chunks_;
  UserOverrides given_;
  PageAttention page_scores_;
};

}  // namespace kvswap
