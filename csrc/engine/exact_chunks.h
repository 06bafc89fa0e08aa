#pragma once

#include <cstdint>
#include <memory>

#include "engine/appender.h"
#include "engine/batch.h"
#include "engine/calls.h"
#include "engine/keeping.h"
#include "engine/layer_steps.h"
#include "engine/past_reader.h"
#include "engine/past_stream.h"
#include "engine/past_visitor.h"

namespace kvswap {

struct PastWalk {
  int64_t layer = 0;
  int64_t part = 0;  // the engine's: see Engine
  int64_t past = 0;  // tokens before the chunk
};

/// Chunks that attend everything before them, which streams by: a prefill's, and any in a layer
/// that never chooses and has outgrown its pages.
///
///   prepare(...), walk(...) for each part, Engine::append(), end(...)
/// or the same with append() first, which prepares by itself. Not thread-safe.
class ExactChunks {
 public:
  ExactChunks(Calls& calls, EngineParts& parts, Batch& batch, PastReader& past, LayerSteps& steps,
              Appender& appender, Keeping& keeping)
      : calls_(calls),
        parts_(parts),
        batch_(batch),
        past_(past),
        steps_(steps),
        appender_(appender),
        keeping_(keeping) {}

  /// Does the pass attend so?
  bool takes(int64_t layer) const { return appender_.is_exact(layer); }
  /// Reserves memory for the next Engine::append(), so that the caller can attend first and the
  /// write overlaps with it. sequences: the caller's.
  Status prepare(int64_t layer, int64_t sequences, int64_t tokens);
  /// Such a chunk is about to come. Where nothing is on disk, what came before has its turn while
  /// it is all there.
  Status begin(int64_t layer);
  /// Counts a chunk that decodes as a step which read all that is sealed.
  void count(int64_t layer);
  /// The exact walk: every token before the chunk once, from the first valid group on. Sealed
  /// groups stream by in blocks, what is newer comes last. Of those that were dropped for good what
  /// is left comes first.
  Status walk(const PastWalk& walk, PastVisitor& visitor);
  /// A chunk is appended and has attended. Where nothing is on disk a first one has its turn here,
  /// and is dropped a layer at a time; a later one, that a crop may take back whole, by the next
  /// step. A turn that fails here is made again there, too.
  void end(int64_t layer, int64_t tokens);

  /// Sealed groups in blocks, as walk() visits them; with_room: for who unpacks them.
  Result<std::unique_ptr<PastStream>> stream(const PastReader::Groups& groups, bool with_room);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  Result<PastBlocks> blocks(const PastReader::Groups& groups, bool with_room);
  Status visit_sealed(const PastReader::Groups& groups, PastVisitor& visitor);
  Status visit_newest(const PastReader::Positions& positions, PastVisitor& visitor);

  Calls& calls_;
  EngineParts& parts_;
  Batch& batch_;
  PastReader& past_;
  LayerSteps& steps_;
  Appender& appender_;
  Keeping& keeping_;
};

}  // namespace kvswap
