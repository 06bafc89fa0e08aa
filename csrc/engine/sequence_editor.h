#pragma once

#include <cstdint>
#include <span>

#include "engine/memory/memory_reservations.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/step/step_coordinator.h"

namespace kvswap {

/// What changes in the middle of a session: its length, its sequences, its projections.
///
/// Before any of it no choice is under way (StepCoordinator::drain). Each is all or nothing, with
/// two exceptions. A layer has no projection after a set_projection() that failed. A crop() whose
/// second reading fails is unfinished: see EngineContext::unfinished_crop.
/// Not thread-safe.
class SequenceEditor {
 public:
  SequenceEditor(EngineContext& context, Batch& batch, Sealer& sealer, PrefixReader& past,
                 MemoryReservations& account, StepCoordinator& steps)
      : context_(context),
        batch_(batch),
        sealer_(sealer),
        past_(past),
        account_(account),
        steps_(steps) {}

  /// Layers become shorter from the last one to the first.
  Status crop(int64_t positions);
  Status select_sequences(std::span<const int64_t> indices);
  /// Both [kv_heads * head_dim, rank]; what is sealed is read and summarised anew.
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);

  /// Reads every record that summaries are made from, and changes nothing.
  Status read_all();

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  /// Sealed groups that a crop brings back to the tail.
  struct Returning {
    int64_t layer = 0;
    int64_t sealed = 0;  // groups that stay in the file
    int64_t groups = 0;  // of each sequence, after those
  };
  Result<Returning> returning_of(int64_t layer, int64_t positions) const;
  /// Some of one sequence's groups, in memory until the next are read.
  struct Read {
    const PrefixReader::Groups& groups;
    const PrefixPages& listed;
  };
  /// All of them, block by block: Status visit(const Read&).
  template <typename Visit>
  Status read(const Returning& returning, const Visit& visit);
  Status crop_layer(const Returning& returning, int64_t positions);
  Status summarise(int64_t layer);
  void gather(const Read& read, int64_t first, int64_t count, std::byte* target) const;

  EngineContext& context_;
  Batch& batch_;
  Sealer& sealer_;
  PrefixReader& past_;
  MemoryReservations& account_;
  StepCoordinator& steps_;
};

}  // namespace kvswap
