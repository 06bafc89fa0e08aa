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
/// Before any of it no choice is under way (StepCoordinator::drain). Each is all or nothing, but
/// for set_projection(), after whose failure the layer has none. Not thread-safe.
class SequenceEditor {
 public:
  SequenceEditor(EngineContext& context, Batch& batch, Tail& tail, Sealer& sealer,
                 PrefixReader& past, MemoryReservations& account, StepCoordinator& steps)
      : context_(context),
        batch_(batch),
        tail_(tail),
        sealer_(sealer),
        past_(past),
        account_(account),
        steps_(steps) {}

  Status crop(int64_t positions);
  Status select_sequences(std::span<const int64_t> indices);
  /// Both [kv_heads * head_dim, rank]; what is sealed is read and summarised anew.
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  /// Sealed groups that a crop brings back to the tail.
  struct Returning {
    int64_t layer = 0;
    int64_t sealed = 0;  // groups that stay in the file
    int64_t groups = 0;
    std::vector<std::byte*> records;            // [batch], each [groups, record_bytes]
    std::vector<std::shared_ptr<void>> memory;  // [batch], that they stand in
  };
  Result<Returning> read_returning(int64_t layer, int64_t positions);
  Status make_room(int64_t sequence, Returning& returning);
  Status crop_layer(const Returning& returning, int64_t positions);
  Status summarise(int64_t layer);

  EngineContext& context_;
  Batch& batch_;
  Tail& tail_;
  Sealer& sealer_;
  PrefixReader& past_;
  MemoryReservations& account_;
  StepCoordinator& steps_;
};

}  // namespace kvswap
