#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memory/replacement.h"

namespace kvswap {

/// The reuse buffer's book-keeping: which unit each page of a partition holds (KVSwap 3.4.3's slot
/// table).
///
/// plan() gives every wanted key a page: the one that holds it (a hit), or one whose unit leaves
/// (a load). What a plan hands out is pinned until the next plan(); a load counts as present at
/// once, so the caller must forget() it when the read fails. Not thread-safe.
class PageMap {
 public:
  /// Pages first_page .. first_page + pages - 1.
  PageMap(int32_t first_page, int32_t pages, Replacement replacement);

  struct Assignment {
    int32_t page = -1;
    bool is_load = false;
  };

  /// Does a plan begin a step, or has one before it, that prefetched for it?
  enum class Step { kNew, kSame };

  /// Keys must be distinct and at most as many as there are pages. With kNone everything leaves
  /// before a new step.
  void plan(std::span<const uint64_t> keys, std::span<Assignment> assignments,
            Step step = Step::kNew);
  void forget(uint64_t key);
  /// The page that holds `key` holds what has `new_key` now, which is an update; which page that
  /// is, or -1.
  int32_t rename(uint64_t key, uint64_t new_key);
  /// What the unit in a page is worth until it leaves, or is rated again; 0 at first. Not negative.
  void rate(int32_t page, float score);
  /// The cluster in a page has so many of them, until it leaves; 1 at first. Only where clusters
  /// are replaced as such.
  void describe(int32_t page, int32_t cluster_pages);
  void clear();
  /// The page that holds `key`, or -1.
  int32_t find(uint64_t key) const;

  int32_t pages() const { return static_cast<int32_t>(states_.size()); }
  /// What pages hold, for a session that goes on elsewhere.
  struct Held {
    int32_t page = -1;
    PageState state;
    ClusterState cluster;
  };
  std::vector<Held> held() const;
  uint64_t step() const { return step_; }
  int32_t first_page() const { return first_page_; }
  /// The same of a map that is clear: pages and keys are distinct.
  void restore(uint64_t step, std::span<const Held> held);

  /// At most four buckets and one place in the order a page.
  static constexpr int64_t bytes_per_page(Replacement replacement) {
    return sizeof(PageState) + 5 * sizeof(int32_t) +
           (replacement == Replacement::kClusters ? sizeof(ClusterState) : 0);
  }

 private:
  int32_t bucket_of(uint64_t key) const;
  /// Pages updated from this step on leave last: in the last 16 steps, a quarter of them at most.
  uint64_t stays_from() const;
  int32_t replace(int32_t index, uint64_t key);
  void replace_oldest(std::span<const uint64_t> keys, std::span<Assignment> assignments,
                      size_t loads);
  void put_in_order();
  void insert(uint64_t key, int32_t index);
  void erase(int32_t index);

  int32_t first_page_;
  Replacement replacement_;
  std::vector<PageState> states_;       // [pages]
  std::vector<ClusterState> clusters_;  // [pages], where clusters are replaced as such
  std::vector<int32_t> buckets_;        // open addressing: index into states_ or -1
  // Of kFifo all pages, in the order in which they leave, while is_ordered_; else scratch of
  // plan().
  std::vector<int32_t> order_;
  bool is_ordered_ = false;
  uint64_t step_ = 0;
};

}  // namespace kvswap
