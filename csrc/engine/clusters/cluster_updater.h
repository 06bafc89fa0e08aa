#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/clusters/cluster_maintenance.h"
#include "engine/clusters/cluster_writer.h"
#include "engine/clusters/token_locator.h"
#include "engine/prefill/prefix_reader.h"

namespace kvswap {

/// What left the tail enters clusters of similar keys, which are pages of their own on disk (DynaKV
/// 4.1, 4.2, Algorithm 1).
///
/// The groups stay where they are: they are what a crop, a long chunk and read_back() read. Pages
/// of clusters are copies of the same tokens in another order, for steps to choose from. A token
/// whose cluster is not in memory waits there itself, and is attended; the cluster is packed anew
/// once more tokens wait than may: those that happen to be in the reuse buffer first, then those
/// that most wait for are read. So page-aligned buffers and delayed splits (5.2) are one thing
/// here.
///
/// What is read for rows of a layer is under way together, and so many rows at a time as
/// there is memory for enter their tokens on threads: the order in which they are written
/// does not depend on either.
///
/// Static and local clusters (ClusterOptions::update) are the same but for who joins and who waits.
///
/// A failed call leaves each token at one place. Clusters are then behind what is sealed, and the
/// next call catches up. For layers without a step under way. Not thread-safe.
class ClusterUpdater {
 public:
  ClusterUpdater(EngineContext& context, Batch& batch, PrefixReader& past)
      : context_(context),
        batch_(batch),
        past_(past),
        writer_(context),
        settling_(context, writer_) {}

  /// Are there sealed tokens of a layer that chooses clusters which are not in any?
  bool needs_catch_up(int64_t layer) const;
  /// They enter: token by token, from the tail's pages, or from disk where these hold others now.
  Status catch_up(int64_t layer);
  /// What was sealed of a long chunk, whose first token has this position, enters: block by block.
  /// The tail's pages hold what was sealed of it before.
  Status enter_chunk(int64_t layer, const KeyValueView& tokens, int64_t first_position);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  EnteringRow row_of(int64_t layer, int64_t sequence) {
    return {layer, sequence, TokenLocator(context_, batch_, layer, sequence)};
  }
  int64_t sealed(int64_t layer) const;
  bool is_outside(const EnteringRow& row, int64_t token) const;
  /// Counts the splits of what is done with rows.
  Status counted(std::span<EnteringRow> rows, const std::function<Status()>& enter);
  Status catch_up_rows(std::span<EnteringRow> rows);
  /// The next sealed group of each that is behind, several at a time on threads.
  Status enter_next_groups(std::span<EnteringRow> rows);
  Status enter_row(EnteringRow& row);
  Status enter_block(EnteringRow& row, int64_t end);
  void enter_one_by_one(EnteringRow& row, int64_t end);
  /// It has left the tail, and waits.
  void enter_waiting(const EnteringRow& row, int64_t token);

  EngineContext& context_;
  Batch& batch_;
  PrefixReader& past_;
  ClusterWriter writer_;
  ClusterMaintenance settling_;
  std::vector<float> keys_;  // of a block: [tokens, width]
};

}  // namespace kvswap
