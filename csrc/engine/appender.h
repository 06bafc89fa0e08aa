#pragma once

#include <cstdint>

#include "engine/clusters/cluster_updater.h"
#include "engine/memory/memory_reservations.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/sequence/tail.h"
#include "engine/step/step_coordinator.h"
#include "kvswap/pass.h"

namespace kvswap {

/// New tokens of a layer: those of a decoding step go to the tail, a prefill's past it to the disk.
///
/// append() is all or nothing. A failed background write is tried again by the next call that needs
/// it. prepare() checks and charges ahead of an exact append(), and holds until forget() or the
/// next pass. Not thread-safe.
class Appender {
 public:
  Appender(EngineContext& context, Batch& batch, Sealer& sealer, MemoryReservations& account,
           StepCoordinator& steps, ClusterUpdater& clustering)
      : context_(context),
        batch_(batch),
        sealer_(sealer),
        account_(account),
        steps_(steps),
        clustering_(clustering) {}

  Status prepare(int64_t layer, int64_t batch, int64_t tokens);
  Status append(int64_t layer, const KeyValueView& tokens);
  /// What is prepared is not appended: its memory is free again.
  void forget();
  /// What the next calls belong to.
  void begin(Pass pass) {
    pass_ = pass;
    forget();
  }
  Pass pass() const { return pass_; }
  /// Does the pass attend everything in this layer? Its tokens then go past the tail.
  bool is_exact(int64_t layer) const {
    return pass_ == Pass::kPrefill || batch_.is_restored(layer);
  }
  /// Can a pass of this kind have so many tokens?
  Status check_length(const char* where, int64_t tokens) const;

 private:
  Status check(int64_t layer, int64_t batch, int64_t tokens);
  Status check_positions(int64_t positions) const;
  Status append_chunk(int64_t layer, const KeyValueView& tokens);

  EngineContext& context_;
  Batch& batch_;
  Sealer& sealer_;
  MemoryReservations& account_;
  StepCoordinator& steps_;
  ClusterUpdater& clustering_;
  Pass pass_ = Pass::kPrefill;  // until it is said
  int64_t prepared_ = -1;       // the layer that prepare() was called for; -1: none
  int64_t prepared_tokens_ = 0;
};

}  // namespace kvswap
