#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvswap {

/// Tokens of a cluster that are packed into pages anew, and what becomes of those of its slots that
/// are not empty.
struct ClusterPlan {
  int64_t cluster = 0;
  std::vector<int64_t> tokens;  // in the order in which they fill the slots, page_tokens each
  std::vector<int32_t> slots;
  std::vector<int64_t> stay;  // the new pages are to stand beside them
  std::vector<int64_t> go;    // they hold nobody else
};

/// Which of a cluster's tokens are packed anew: those that stand in no full page of their own, or
/// all of them.
enum class Pack { kLoose, kAll };

/// In which page each token of a row stands that has left the tail: a cluster has pages_a_cluster
/// slots, from cluster * pages_a_cluster on, some of which hold a record of up to page_tokens
/// tokens. Or it waits in memory, until its cluster is packed anew.
///
/// A record never changes: a token that moves leaves a hole in its page's mask, and a page that
/// holds nothing any more is released. Which cluster a token belongs to is for AdaptiveClusters to
/// say; here it may still stand where it was. Numbers only: who calls moves the bytes. Takes its
/// memory when it grows. Not thread-safe.
class ClusterPages {
 public:
  /// Of place(): no page, and the first that waits; further ones are lower.
  static constexpr int32_t kNowhere = -1;
  static constexpr int32_t kFirstWaiting = -2;

  ClusterPages(int64_t page_tokens, int64_t pages_a_cluster)
      : page_tokens_(page_tokens), pages_a_cluster_(pages_a_cluster) {}

  /// Room for more.
  void grow(int64_t tokens_max, int64_t clusters_max);
  static int64_t bytes(int64_t tokens_max, int64_t clusters_max, int64_t pages_a_cluster);

  /// Where a token of a slot stands: slot * page_tokens + its position; negative: in none.
  int32_t place(int64_t token) const { return places_[token]; }
  /// Bit i: the page's token i is there. 0: the slot is empty.
  uint64_t mask(int64_t slot) const { return masks_[slot]; }
  int64_t page_tokens() const { return page_tokens_; }
  /// Slots of a cluster that are not empty.
  int64_t pages(int64_t cluster) const;
  /// Those of the cluster that this slot is one of.
  int64_t pages_beside(int64_t slot) const { return pages(slot / pages_a_cluster_); }
  /// Calls with each slot of a cluster that is not empty.
  template <typename Call>
  void each_page(int64_t cluster, const Call& call) const {
    const int64_t first = cluster * pages_a_cluster_;
    for (int64_t slot = first; slot < first + pages_a_cluster_; ++slot) {
      if (masks_[slot] != 0) call(slot);
    }
  }

  /// Tokens that wait, in the order of their places in memory.
  std::span<const int64_t> waiting() const { return waiting_; }
  /// The place of a token that waits; -1: it does not.
  int64_t waiting_at(int64_t token) const {
    return places_[token] <= kFirstWaiting ? kFirstWaiting - places_[token] : -1;
  }
  /// The token waits at the next place.
  void wait(int64_t token);
  /// It waits no more; the last of those that wait takes its place. From where that comes: its
  /// bytes follow.
  int64_t end_wait(int64_t token);

  /// What packing the cluster's members (all of them, rising) anew would be: of its pages those
  /// that are full stay, unless all are packed. None where nothing would change, or its slots are
  /// still in use by others.
  std::optional<ClusterPlan> plan(int64_t cluster, std::span<const int64_t> members,
                                  Pack pack = Pack::kLoose) const;
  /// The highest of the clusters whose tokens stand in this one's slots, by the cluster that each
  /// token of the row belongs to; -1: there is no other.
  int64_t other_in_slots(int64_t cluster, std::span<const int32_t> clusters) const;
  /// The tokens stand there now. Returns slots that are empty since.
  std::vector<int32_t> install(const ClusterPlan& plan);
  /// Tokens from this one on stand nowhere; none of them waits any more. Returns slots that are
  /// empty since.
  std::vector<int32_t> truncate(int64_t tokens);
  /// What was saved, where no token stands anywhere yet.
  void restore(const std::vector<int32_t>& places);

 private:
  int64_t slot_of(int64_t token) const { return places_[token] / page_tokens_; }
  /// Once the plan's tokens, wherever they stand, have left them.
  void divide_slots(ClusterPlan& plan) const;
  void leave(int64_t token, std::vector<int32_t>& emptied);

  int64_t page_tokens_;
  int64_t pages_a_cluster_;
  std::vector<int32_t> places_;   // [tokens_max]
  std::vector<uint64_t> masks_;   // [clusters_max * pages_a_cluster]
  std::vector<int64_t> waiting_;  // their tokens
};

}  // namespace kvswap
