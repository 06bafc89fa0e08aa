#pragma once

#include <cstdint>

#include "engine/account.h"
#include "engine/batch.h"
#include "engine/clustering.h"
#include "engine/layer_steps.h"
#include "engine/sealer.h"
#include "engine/tail.h"

namespace kvswap {

/// New tokens of a layer: a few go to the tail, a long chunk goes past it to the disk.
///
/// append() is all or nothing. A failed background write is permanent: every later call returns
/// it. prepare() checks and charges ahead of a long chunk's append(), and holds until forget().
/// Not thread-safe.
class Appender {
 public:
  Appender(EngineParts& parts, Batch& batch, Tail& tail, Sealer& sealer, Account& account,
           LayerSteps& steps, Clustering& clustering)
      : parts_(parts),
        batch_(batch),
        tail_(tail),
        sealer_(sealer),
        account_(account),
        steps_(steps),
        clustering_(clustering) {}

  Status prepare(int64_t layer, int64_t batch, int64_t tokens);
  Status append(int64_t layer, const KeyValueView& tokens);
  void forget() { prepared_ = -1; }
  /// Does it go past the tail? What attends from the disk does too.
  bool is_long(int64_t layer, int64_t tokens) const {
    return tokens > parts_.options.select_queries_max || batch_.is_restored(layer);
  }

 private:
  Status check(int64_t layer, int64_t batch, int64_t tokens);
  Status append_chunk(int64_t layer, const KeyValueView& tokens);

  EngineParts& parts_;
  Batch& batch_;
  Tail& tail_;
  Sealer& sealer_;
  Account& account_;
  LayerSteps& steps_;
  Clustering& clustering_;
  int64_t prepared_ = -1;  // the layer that prepare() was called for; -1: none
};

}  // namespace kvswap
