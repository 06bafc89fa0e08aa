#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "store/layout.h"

namespace kvswap {

struct PoolOptions {
  int64_t layers = 0;
  int64_t usual_pages = 0;  // of a cluster: room for a second one of that size
  int64_t slack_pages = 0;  // between the two

  /// Of a new pool, for a cluster of so many.
  int64_t pool_pages(int64_t cluster_pages) const {
    return cluster_pages + usual_pages + slack_pages + 2;
  }
};

/// Pages of clusters in pools of two (DynaKV 5.2); groups as another layout has them.
///
/// A pool is a range of the file for two clusters of a layer, one near each end, which grow towards
/// each other. All pages of a cluster are neighbours at all times, so that one read fetches them:
/// new ones are placed at an end of those that stay. A record is never overwritten, so the page
/// that is not full yet stands now at the one end, now at the other: for that each cluster has one
/// free page on the side of the pool's end. Where there is no room at either end all pages of the
/// cluster are to be placed anew: near the old ones if there is room, else in a pool that has room
/// for one more, else in a new one. A pool that holds no page any more is given back.
///
/// Not thread-safe.
class PairedPoolLayout final : public Layout {
 public:
  /// Of pages that are one bit each.
  static constexpr int64_t kPoolPagesMax = 64;

  /// groups: empty so far. Pools have kPoolPagesMax pages at most.
  PairedPoolLayout(std::unique_ptr<Layout> groups, const PoolOptions& options)
      : groups_(std::move(groups)), options_(options), open_(options.layers) {}

  int64_t record_bytes() const override { return groups_->record_bytes(); }
  int64_t place(const PlaceArgs& args) override;
  bool has_room_beside(std::span<const int64_t> offsets, int64_t count) const override;
  void release(int64_t offset_bytes) override;
  int64_t end_bytes() const override { return groups_->end_bytes(); }
  void close_runs() override { groups_->close_runs(); }
  /// Pools that are made from then on hold one cluster, and nothing else.
  void tighten() override;
  void clear() override;
  void each_hole(const std::function<void(int64_t, int64_t)>& hole) const override;

  /// Of memory, a pool; there are never more than clusters that have pages.
  static constexpr int64_t bytes_per_pool() { return 128; }

 private:
  struct Pool {
    int64_t layer = 0;
    int64_t pages = 0;
    uint64_t used = 0;  // bit i: its page i holds a record

    bool is_free(int64_t first, int64_t count) const;
    /// Free pages before the first record, and after the last one.
    int64_t free_at_begin() const;
    int64_t free_at_end() const;
  };
  using Pools = std::map<int64_t, Pool>;  // by their first page's offset
  /// Neighbours within a pool.
  struct Stretch {
    Pools::const_iterator pool;
    int64_t begin = 0;
    int64_t end = 0;
  };

  Pools::const_iterator find(int64_t offset_bytes) const;
  /// Nothing: they are no neighbours.
  std::optional<Stretch> stretch_of(std::span<const int64_t> offsets) const;
  /// Where so many pages may stand at an end of a stretch; -1: nowhere.
  static int64_t place_at_end(const Stretch& stretch, int64_t count);
  /// The nearest to a page that goes; -1: there is no room in its pool.
  static int64_t place_near(const Pool& pool, int64_t page, int64_t count);
  /// Near an end of the pool, and far from who is there; -1.
  int64_t place_beside_other(const Pool& pool, int64_t count) const;
  Pools::const_iterator make_pool(int64_t layer, int64_t count);
  int64_t use(Pools::const_iterator pool, int64_t first, int64_t count);
  void note_room(Pools::const_iterator pool);

  std::unique_ptr<Layout> groups_;
  PoolOptions options_;
  bool is_tight_ = false;
  Pools pools_;
  std::vector<std::set<int64_t>> open_;  // [layers]: pools that may have room for one more
};

}  // namespace kvswap
