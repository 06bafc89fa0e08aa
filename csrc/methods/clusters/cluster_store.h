#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "methods/clusters/adaptive_clusters.h"
#include "methods/clusters/cluster_pages.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// One row, a sequence of a layer: which of its tokens are alike, and where they stand.
struct ClusterRow {
  AdaptiveClusters clusters;
  ClusterPages pages;

  /// Clusters that tokens wait for, to be split or to be packed with them: those that most wait for
  /// first, of equal ones the lower.
  struct WaitedFor {
    int64_t cluster = 0;
    int64_t tokens = 0;
  };
  std::vector<WaitedFor> waited_for() const;

  /// Tokens from this one on, none of which waits in `pages` any more, are in no cluster. Returns
  /// slots that are empty since.
  std::vector<int32_t> truncate(int64_t tokens);
  /// See AdaptiveClusters: what a crop, or an error, has left.
  void free_numbers();
};

/// The clusters of all layers and sequences. Takes its memory in grow(), which who charges it calls
/// before tokens come. Not thread-safe.
class ClusterStore {
 public:
  explicit ClusterStore(const MethodOptions& options);

  /// Does the layer choose clusters?
  bool has(int64_t layer) const { return !rows_[layer].empty(); }
  ClusterRow& of(int64_t layer, int64_t sequence) { return rows_[layer][sequence]; }
  const ClusterRow& of(int64_t layer, int64_t sequence) const { return rows_[layer][sequence]; }
  int64_t sequences() const { return sequences_; }
  const ClusterOptions& options() const { return options_.clusters; }

  void set_sequences(int64_t sequences);
  /// Sequence i of the new batch has the clusters of sequence indices[i] of the old one.
  void select_sequences(std::span<const int64_t> indices);
  /// Room for so many tokens in each row of a layer.
  void grow(int64_t layer, int64_t tokens);
  /// Tokens that each row of a layer has room for.
  int64_t room(int64_t layer) const { return room_[layer]; }
  /// The same after grow(): it comes in pieces.
  static int64_t room_for(int64_t tokens);
  /// So many tokens may a row have: where a token stands in its page is a number of 32 bits.
  static int64_t tokens_most(const MethodOptions& options);
  /// Of a row with room for so many tokens; one that grows takes both at once for a moment.
  static int64_t row_bytes(const MethodOptions& options, int64_t room);
  /// Pages that so many tokens of a row take on disk at most.
  static int64_t pages_max(const MethodOptions& options, int64_t tokens);

 private:
  MethodOptions options_;
  int64_t sequences_ = 0;
  std::vector<std::vector<ClusterRow>> rows_;  // [layers][sequences]; none of exact layers
  std::vector<int64_t> room_;                  // [layers]: tokens of each row
};

/// Slots of a cluster.
int64_t pages_a_cluster(const MethodOptions& options);

}  // namespace kvswap
