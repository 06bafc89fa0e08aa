#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "methods/clusters/cluster_options.h"
#include "methods/clusters/cluster_table.h"
#include "methods/clusters/pending_tokens.h"

namespace kvswap {

struct ClusterNumbers;

struct ClusterCounts {
  int64_t splits = 0;
  int64_t refused = 0;  // splits, for lack of numbers
  int64_t forced = 0;   // clusters read for what waited
};

/// That no cluster's variance is to exceed.
struct SplitThreshold {
  std::optional<double> variance;  // none until 512 tokens are clustered
  int64_t settled_at = 0;  // tokens that had left the tail then; 0: not known, of an older file

  bool operator==(const SplitThreshold&) const = default;
};

/// DynaKV: clusters of similar keys that grow, and split while decoding (4.1, 4.2, Algorithm 1).
///
/// Of one row, its tokens named by their number. They leave the tail in order: those of the prompt
/// at once, later ones at the end of a step. Keys stay with the caller and are given to each call:
/// of tokens that enter, and of the members of clusters that may be split. What the paper leaves
/// open is decided as in tests/python/reference_methods/clusters.py, the reference in plain torch.
///
/// There are never more than ceil(1.25 tokens_max / cluster_tokens) clusters, however often they
/// split: then a token joins the nearest that has room. Only a split moves a token from one cluster
/// to another, and then to a new one. With another ClusterOptions::update later tokens enter as
/// that says; a prompt is divided in the same way. Centroids are fp32, sums in between fp64 and in
/// the order of tokens, so that neither threads nor the CPU change a bit. Ties go to the lower
/// number. Not thread-safe.
class AdaptiveClusters {
 public:
  /// width and tokens_max are positive, the options have no fault().
  AdaptiveClusters(int64_t width, int64_t tokens_max, const ClusterOptions& options);

  const ClusterTable& table() const { return table_; }
  const ClusterCounts& counts() const { return counts_; }
  /// Tokens that have left the tail, sinks included.
  int64_t left() const { return left_; }
  /// Tokens that are in no cluster until theirs is split, or until they are clustered among
  /// themselves; they are attended in every step.
  const PendingTokens& waiting() const { return waiting_; }
  const SplitThreshold& threshold() const { return threshold_; }
  /// Room for more tokens, and clusters of them.
  void grow(int64_t tokens_max);
  /// Of a row with room for so many.
  static int64_t bytes(int64_t width, int64_t tokens_max, const ClusterOptions& options);

  /// Tokens before `end`, in blocks of ClusterOptions::block_min() at least: k-means, then what is
  /// too large is split, and what is too wide, the widest of the block first, while there are at
  /// most 1.25 times as many clusters as the tokens so far would fill. Nothing waits. Fewer tokens
  /// enter one by one, as if every cluster had been read. Returns clusters that it made, in order.
  std::vector<int64_t> enter_prompt(const KeyRows& keys, int64_t end, const Execution& execution);

  /// Tokens before `end` leave the tail, at the end of a step that has read these clusters. Returns
  /// clusters that had to be read besides, since too many tokens waited.
  std::vector<int64_t> enter(const KeyRows& keys, int64_t end, std::span<const int64_t> read);

  // The same in its steps: look_ahead(), enter_token() for each, cluster_later(), take_in() each
  // cluster that is waited for and is read, take_in() of the one most waited for as long as too
  // many wait, end_step().

  using IsRead = std::function<bool(int64_t cluster)>;
  /// Neither a sink nor padding enters a cluster: said before it leaves the tail.
  void put_outside(int64_t token) { table_.put_outside(token, kInSinks); }
  /// The nearest clusters of those before `end` are looked for at once: sooner, and no choice of
  /// theirs changes. Until the step ends.
  void look_ahead(const KeyRows& keys, int64_t end);
  /// The next token that leaves the tail.
  void enter_token(const KeyRows& keys, int64_t token, const IsRead& is_read);
  /// Local tokens become clusters of their own once they fill as many as are made at once; where no
  /// number is left they join where room is.
  void cluster_later(const KeyRows& keys);
  /// Who waits for it enters: the cluster is read, and split, unless that is refused.
  void take_in(const KeyRows& keys, int64_t cluster);
  /// Clusters that this step's splits changed, or that were made of later tokens, rising.
  std::vector<int64_t> changed() const;
  void end_step();

  using HasPages = std::function<bool(int64_t cluster)>;
  /// Tokens from this one on stand in the tail again. Clusters are not what they would be had the
  /// tokens never come: splits stay. Sinks stay outside. A threshold that was settled with tokens
  /// that are gone is settled by the clusters that are left, or is not settled any more. Numbers of
  /// empty clusters are given to new ones, if no token waits for the cluster and it has no pages:
  /// else others' tokens stand in them.
  void truncate(int64_t tokens, const HasPages& has_pages);

 private:
  friend struct ClusterNumbers;
  using Marks = std::vector<bool>;  // [clusters_max]

  void enter_block(const KeyRows& keys, int64_t end, const Execution& execution);
  void enter_in_memory(const KeyRows& keys, std::span<const int64_t> tokens);
  /// What is too large, or too wide, of clusters made from made_[first] on.
  void divide_block(const KeyRows& keys, int64_t first);
  void enter_by(ClusterUpdate update, const KeyRows& keys, int64_t token, const IsRead& is_read);
  /// It joins its nearest cluster, has it split, or waits for it.
  void enter_adaptive(const KeyRows& keys, int64_t token, const IsRead& is_read);
  /// Alone in a cluster, or where room is.
  void open(const KeyRows& keys, int64_t token);
  void join_where_room_is(const KeyRows& keys, int64_t token);
  /// In two, and further only while a part is too large; the largest keeps the number. Where no
  /// number is left, what a full part cannot hold joins the nearest that has room: not its members.
  void split(const KeyRows& keys, int64_t cluster, std::vector<int64_t> tokens);

  ClusterOptions options_;
  ClusterTable table_;
  ClusterCounts counts_;
  int64_t left_;
  SplitThreshold threshold_;
  PendingTokens waiting_;
  Marks changed_;              // by a split of this step, or made in it
  std::vector<int64_t> made_;  // in this step, in order
};

inline std::vector<int64_t> members_of(const AdaptiveClusters& clusters, int64_t cluster) {
  return clusters.table().members(cluster, clusters.left());
}

}  // namespace kvswap
