#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "methods/cluster_table.h"

namespace kvswap {

struct ClusterOptions {
  int64_t cluster_tokens = 32;      // that k-means aims at
  int64_t cluster_tokens_max = 64;  // that no cluster exceeds
  double split_factor = 1.25;       // too wide: so many times the mean variance of the row
  int64_t pending_tokens = 16;      // that wait; with so many a cluster is read for them
  int64_t sink_tokens = 0;          // first ones, which enter no cluster

  /// What is wrong with them; empty: nothing.
  std::string fault() const;
};

struct ClusterCounts {
  int64_t splits = 0;
  int64_t refused = 0;  // splits, for lack of numbers
  int64_t forced = 0;   // clusters read for what waited
};

/// DynaKV: clusters of similar keys that grow, and split while decoding (4.1, 4.2, Algorithm 1).
///
/// Of one row, its tokens named by their number. They leave the tail in order: those of the prompt
/// at once, later ones at the end of a step. Keys stay with the caller and are given to each call;
/// of clusters that a call does not change none is looked at. What the paper leaves open is decided
/// as in kvswap_torch/methods/clusters.py, the reference in plain torch.
///
/// There are never more than ceil(1.25 tokens_max / cluster_tokens) clusters, however often they
/// split: then a token joins the nearest that has room. Centroids are fp32, sums in between fp64
/// and in the order of tokens, so that neither threads nor the CPU change a bit. Ties go to the
/// lower number. Not thread-safe.
class Clusters {
 public:
  /// width and tokens_max are positive, the options have no fault().
  Clusters(int64_t width, int64_t tokens_max, const ClusterOptions& options);

  const ClusterTable& table() const { return table_; }
  const ClusterCounts& counts() const { return counts_; }
  /// Tokens that have left the tail, sinks included.
  int64_t left() const { return left_; }
  /// Tokens that wait; they are attended in every step.
  int64_t pending() const { return static_cast<int64_t>(waiting_.size()); }
  /// That no cluster's variance is to exceed; none until 512 tokens are clustered.
  std::optional<double> threshold() const { return threshold_; }
  std::vector<int64_t> members(int64_t cluster) const { return table_.members(cluster, left_); }

  /// Tokens before `end`, in blocks: k-means, then what is too large is split, and what is too
  /// wide, the widest first, while there are at most 1.25 times as many clusters as the tokens so
  /// far would fill. Nothing waits: everything is in memory.
  void enter_prompt(const KeyRows& keys, int64_t end, const Execution& execution);

  /// Tokens before `end` leave the tail, at the end of a step that has read these clusters. Returns
  /// clusters that had to be read besides, since too many tokens waited.
  std::vector<int64_t> enter(const KeyRows& keys, int64_t end, std::span<const int64_t> read);

 private:
  struct Waiting {
    int64_t cluster;
    int64_t token;
  };
  using Marks = std::vector<bool>;  // [clusters_max]

  int64_t share_of(int64_t tokens) const;
  void enter_block(const KeyRows& keys, int64_t end, const Execution& execution);
  void enter_in_memory(const KeyRows& keys, std::span<const int64_t> tokens);
  void divide_block(const KeyRows& keys, int64_t first);
  void settle_threshold();
  void enter_one(const KeyRows& keys, int64_t token, const Marks& read);
  bool would_fit(const float* key, int64_t cluster) const;
  /// Alone in a cluster, or where room is.
  void open(const KeyRows& keys, int64_t token);
  void join_where_room_is(const KeyRows& keys, int64_t token);
  int64_t most_waited_for() const;
  void take_in_waiting(const KeyRows& keys, int64_t cluster);
  /// In two, and further only while a part is too large; the largest keeps the number. Where no
  /// number is left, what a full part cannot hold joins the nearest that has room.
  void split(const KeyRows& keys, int64_t cluster, std::vector<int64_t> tokens);

  ClusterOptions options_;
  ClusterTable table_;
  ClusterCounts counts_;
  int64_t left_;
  std::optional<double> threshold_;
  std::vector<Waiting> waiting_;  // in the order in which they came
  Marks changed_;                 // by a split of this step
};

}  // namespace kvswap
