#pragma once

#include <cstdint>
#include <memory>

#include "engine/appender.h"
#include "engine/call_guard.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/prefill/prefix_stream.h"
#include "engine/prefill/prefix_visitor.h"
#include "engine/retention/retention_manager.h"
#include "engine/sequence/batch.h"
#include "engine/step/step_coordinator.h"

namespace kvswap {

struct PrefixWalk {
  int64_t layer = 0;
  int64_t sequence = 0;  // the engine's: see Engine
  int64_t past = 0;      // tokens before the chunk
};

/// Chunks that attend everything before them, which streams by: a prefill's, and any in a layer
/// that never chooses and has outgrown its pages.
///
///   prepare(...), walk(...) for each sequence, Engine::append(), end(...)
/// or the same with append() first, which prepares by itself. Not thread-safe.
class ChunkedPrefill {
 public:
  ChunkedPrefill(CallGuard& calls, EngineContext& context, Batch& batch, PrefixReader& past,
                 StepCoordinator& steps, Appender& appender, RetentionManager& retention)
      : calls_(calls),
        context_(context),
        batch_(batch),
        past_(past),
        steps_(steps),
        appender_(appender),
        retention_(retention) {}

  /// Does the pass attend so?
  bool takes(int64_t layer) const { return appender_.is_exact(layer); }
  /// Reserves memory for the next Engine::append(), so that the caller can attend first and the
  /// write overlaps with it. sequences: the caller's.
  Status prepare(int64_t layer, int64_t sequences, int64_t tokens);
  /// Such a chunk is about to come. Where nothing is on disk, what came before has its refresh
  /// while it is all there.
  Status begin(int64_t layer);
  /// Counts a chunk that decodes as a step which read all that is sealed.
  void count(int64_t layer);
  /// The exact walk: every token before the chunk once, from the first valid group on. Sealed
  /// groups stream by in blocks, what is newer comes last. Of those that were discarded what
  /// is left comes first.
  Status walk(const PrefixWalk& walk, PrefixVisitor& visitor);
  /// A chunk is appended and has attended. Where nothing is on disk a first one has its refresh
  /// here, and is dropped a layer at a time; a later one, that a crop may take back whole, by the
  /// next step. A refresh that fails here is made again there, too.
  void end(int64_t layer, int64_t tokens);

  /// Sealed groups in blocks, as walk() visits them; with_room: for who unpacks them.
  Result<std::unique_ptr<PrefixStream>> stream(const PrefixReader::Groups& groups, bool with_room);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  Result<PrefixBlocks> blocks(const PrefixReader::Groups& groups, bool with_room);
  Status visit_sealed(const PrefixReader::Groups& groups, PrefixVisitor& visitor);
  Status visit_newest(const PrefixReader::Positions& positions, PrefixVisitor& visitor);

  CallGuard& calls_;
  EngineContext& context_;
  Batch& batch_;
  PrefixReader& past_;
  StepCoordinator& steps_;
  Appender& appender_;
  RetentionManager& retention_;
};

}  // namespace kvswap
