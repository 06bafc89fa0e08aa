#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/cluster_bytes.h"
#include "engine/cluster_writer.h"
#include "engine/past_reader.h"

namespace kvswap {

/// What left the tail enters clusters of similar keys, which are pages of their own on disk (DynaKV
/// 4.1, 4.2, Algorithm 1).
///
/// The groups stay where they are: they are what a crop, a long chunk and read_back() read. Pages
/// of clusters are copies of the same tokens in another order, for steps to choose from. A token
/// whose cluster is not in memory waits there itself, and is attended; the cluster is packed anew
/// once more tokens wait than may: those that happen to be in the reuse buffer first, then the one
/// that most wait for is read. So page-aligned buffers and delayed splits (5.2) are one thing here.
///
/// Static and local clusters (ClusterOptions::update) are the same but for who joins and who waits.
///
/// A failed call leaves each token at one place. Clusters are then behind what is sealed, and the
/// next call catches up. For layers without a step under way. Not thread-safe.
class Clustering {
 public:
  Clustering(EngineParts& parts, Batch& batch, const Tail& tail, PastReader& past)
      : parts_(parts), batch_(batch), tail_(tail), past_(past), writer_(parts) {}

  /// Are there sealed tokens of a layer that chooses clusters which are not in any?
  bool is_behind(int64_t layer) const;
  /// They enter: token by token, from the tail's pages, or from disk where these hold others now.
  Status catch_up(int64_t layer);
  /// What was sealed of a long chunk, whose first token has this position, enters: block by block.
  /// The tail's pages hold what was sealed of it before.
  Status enter_chunk(int64_t layer, const KeyValueView& tokens, int64_t first_position);

 private:
  struct Row {
    int64_t layer = 0;
    int64_t sequence = 0;
    ClusterBytes& bytes;
    ClusterRow& data() const { return bytes.row(); }
  };
  static KeyRows keys_of(const Row& row);
  int64_t sealed(int64_t layer) const;
  bool is_outside(const Row& row, int64_t token) const;
  /// Counts the splits of what is done with a row.
  Status counted(const Row& row, Status (Clustering::*enter)(const Row& row));
  Status catch_up_row(const Row& row);
  Status enter_row(const Row& row);
  Status enter_block(const Row& row, int64_t end);
  Status enter_one_by_one(const Row& row, int64_t end);
  /// It has left the tail, and waits.
  void enter_waiting(const Row& row, int64_t token);
  /// Splits what this step's tokens call for and is in memory; no more tokens wait than may.
  Status settle(const Row& row);
  Status pack_changed(const Row& row);
  Status pack_some(const Row& row);
  Status force(const Row& row);
  /// What the cluster is packed from is read; then it is packed.
  Status pack(const Row& row, int64_t cluster);
  Status read(const Row& row, std::span<const int64_t> tokens);

  EngineParts& parts_;
  Batch& batch_;
  const Tail& tail_;
  PastReader& past_;
  ClusterWriter writer_;
  std::vector<float> keys_;          // of a block: [tokens, width]
  std::shared_ptr<std::byte> read_;  // [cluster_read_pages(), record_bytes]
};

}  // namespace kvswap
