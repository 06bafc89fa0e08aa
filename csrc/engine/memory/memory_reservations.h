#pragma once

#include <cstdint>
#include <string>

#include "engine/engine_context.h"
#include "memory/arena.h"

namespace kvswap {

class Batch;

/// What all parts of an engine reserve: memory_need().
using NeedOf = Arena (*)(const Plan& plan, const Extent& extent);

/// The smallest kv_memory_bytes that holds what a plan's options need under it; what they have is
/// of no matter. Write buffers grow with it.
int64_t least_budget(const Plan& plan, const Extent& extent, NeedOf need);

/// All arithmetic of an engine's ledger: what is charged before it is allocated, and what is
/// released once it is freed. What is charged is what parts reserve: `need` counts that.
///
/// A failed charge leaves the ledger as it was. Not thread-safe.
class MemoryReservations {
 public:
  MemoryReservations(EngineContext& context, NeedOf need);

  /// What grows with what the sequences hold: summaries, tables, scores, records where nothing is
  /// on disk.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

  /// What has its size from the start: the staging of writes and long chunks.
  Status charge_fixed();
  /// Would a batch and its context fit in the budget, the quota and the disk?
  Status check_room(const Extent& extent) const;

  /// Pages and tables of a sequence that holds nothing.
  const Arena& sequence() const { return sequence_; }

  /// What stands on the device beside the pages; reserves it there. Where the device has no room
  /// left, even for what stood there before, the engine is broken.
  Status reserve(int64_t batch, int64_t groups);
  /// What a layer's groups will need that `positions` make due; spare sequences give way to it.
  Status charge_growth(Batch& batch, int64_t layer, int64_t positions);
  /// Tables and scores of what is sealed, for a batch that grows to `sequences`.
  Status charge_batch(const Batch& batch, int64_t sequences);
  Status charge_projection(int64_t layer);
  /// And makes room for clusters of so many tokens in a layer's rows, which have none.
  Status charge_cluster_room(const Batch& batch, int64_t layer, int64_t room);
  /// Tables, scores and summaries of a batch that was saved with `groups` sealed.
  Status charge_loaded(const Batch& batch, int64_t groups, int64_t summary_bytes);
  /// The summary of a layer's groups, those due included.
  Status charge_summary(const Batch& batch, int64_t layer);
  /// Releases what was charged beyond what is held and what the tail will still seal.
  void drain(Batch& batch);
  void release_scores();

 private:
  Status take_place(int64_t batch, int64_t groups);
  Status charge_scored(Arena arena, int64_t sequences, int64_t groups, const std::string& what);
  Status check_disk(const Extent& extent, const std::string& of) const;

  EngineContext& context_;
  const NeedOf need_;
  const Arena fixed_;  // of an engine that has no sequence
  const Arena sequence_;
  int64_t reserved_batch_ = 0;   // reserve()'s largest
  int64_t reserved_groups_ = 0;  // the same
  int64_t scored_bytes_ = 0;     // charged for scores so far
};

}  // namespace kvswap
