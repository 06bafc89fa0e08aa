#pragma once

#include <cstdint>

#include "engine/engine_parts.h"

namespace kvswap {

class Batch;

/// All arithmetic of an engine's ledger: what is charged before it is allocated, and what is
/// released once it is freed. memory_need() says the same ahead of time.
///
/// A failed charge leaves the ledger as it was. Not thread-safe.
class Account {
 public:
  explicit Account(EngineParts& parts) : parts_(parts) {}

  static Status charge_timeline(EngineParts& parts);
  /// The staging buffers of writes and long chunks.
  static Status charge_staging(EngineParts& parts);

  /// Would a batch and its context fit in the budget, the quota and the disk?
  Status check_room(int64_t batch, int64_t context) const;

  // Pages and tables of one sequence.
  Status check_sequence() const;
  Status charge_sequence();
  void release_sequence();

  /// What stands on the device beside the pages; reserves it there. Where the device has no room
  /// left, even for what stood there before, the engine is broken.
  Status reserve(int64_t batch, int64_t groups);
  /// What a layer's groups will need that `positions` make due; spare sequences give way to it.
  Status charge_growth(Batch& batch, int64_t layer, int64_t positions);
  /// Tables and scores of what is sealed, for a batch that grows to `sequences`.
  Status charge_batch(const Batch& batch, int64_t sequences);
  Status charge_projection(int64_t rank);
  /// Tables, scores and summaries of a batch that was saved with `groups` sealed.
  Status charge_loaded(const Batch& batch, int64_t groups, int64_t summary_bytes);
  /// The summary of a layer's groups, those due included.
  Status charge_summary(const Batch& batch, int64_t layer);
  /// Releases what was charged beyond what is held and what the tail will still seal.
  void settle(const Batch& batch);
  void release_scores();

 private:
  Status take_place(int64_t batch, int64_t groups);
  int64_t score_bytes_to_add(int64_t sequences, int64_t groups) const;
  int64_t cluster_bytes_to_grow(const ClusterRows& clusters, int64_t layer, int64_t tokens) const;

  EngineParts& parts_;
  int64_t reserved_batch_ = 0;   // reserve()'s largest
  int64_t reserved_groups_ = 0;  // the same
  int64_t scored_bytes_ = 0;     // charged for scores so far
};

}  // namespace kvswap
