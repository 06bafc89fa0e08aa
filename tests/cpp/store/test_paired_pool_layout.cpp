#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "store/paired_pool_layout.h"

namespace kvswap {
namespace {

constexpr int64_t kPage = 512;

std::unique_ptr<PairedPoolLayout> pools_of(const PoolOptions& options) {
  auto groups = SequenceLayout::create(kPage, kPage, options.layers);
  EXPECT_TRUE(groups.is_ok());
  return std::make_unique<PairedPoolLayout>(std::move(groups.value()), options);
}

/// Clusters that grow, are split and dropped, as the engine would have them: what is rewritten
/// goes once what takes its place is there. Checked after each change.
class Lives {
 public:
  Lives(const PoolOptions& options, uint32_t seed)
      : layout_(pools_of(options)), layers_(options.layers), random_(seed) {}

  PairedPoolLayout& layout() { return *layout_; }
  int64_t clusters() const { return std::ssize(clusters_); }
  int64_t pages() const { return std::ssize(used_); }
  int64_t draw(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % (high - low + 1));
  }

  void add(int64_t pages) {
    clusters_.push_back({.layer = draw(0, layers_ - 1)});
    put(clusters_.back(), {}, pages);
  }
  /// Its page that is not full comes anew, and becomes so many pages.
  void grow(int64_t pages) {
    Cluster& cluster = any();
    const std::vector<int64_t> stay = all_but_last(cluster);
    if (layout_->has_room_beside(stay, pages)) {
      put(cluster, stay, pages);
    } else {
      put(cluster, {}, std::ssize(stay) + pages);
    }
  }
  /// The larger half stays near, the other is a new cluster.
  void split() {
    Cluster& cluster = any();
    const int64_t pages = std::ssize(cluster.places);
    const int64_t layer = cluster.layer;
    put(cluster, {}, (pages + 1) / 2);
    clusters_.push_back({.layer = layer});
    put(clusters_.back(), {}, std::max<int64_t>(1, pages / 2));
  }
  void drop() {
    std::swap(any(), clusters_.back());
    let_go(clusters_.back().places);
    clusters_.pop_back();
  }

  void check() {
    for (const Cluster& cluster : clusters_) {
      const auto [low, high] = std::ranges::minmax(cluster.places);
      ASSERT_EQ(high - low + kPage, std::ssize(cluster.places) * kPage) << "no neighbours";
      ASSERT_TRUE(layout_->has_room_beside(cluster.places, 0));
    }
    int64_t free = 0;
    layout_->each_hole([&](int64_t offset, int64_t length) {
      for (int64_t at = offset; at < offset + length; at += kPage) {
        ASSERT_FALSE(used_.contains(at));
      }
      free += length;
    });
    ASSERT_EQ(free + pages() * kPage, layout_->end_bytes()) << "each place is used, or a hole";
  }

 private:
  struct Cluster {
    int64_t layer = 0;
    std::vector<int64_t> places = {};  // the last is of the page that is not full
  };

  Cluster& any() { return clusters_[draw(0, clusters() - 1)]; }
  static std::vector<int64_t> all_but_last(const Cluster& cluster) {
    return {cluster.places.begin(), cluster.places.end() - 1};
  }
  void let_go(const std::vector<int64_t>& places) {
    for (const int64_t place : places) {
      layout_->release(place);
      ASSERT_EQ(used_.erase(place), 1u);
    }
  }
  void put(Cluster& cluster, const std::vector<int64_t>& stay, int64_t pages) {
    std::vector<int64_t> go;
    std::ranges::copy_if(cluster.places, std::back_inserter(go), [&](int64_t place) {
      return std::ranges::find(stay, place) == stay.end();
    });
    const int64_t offset = layout_->place({.layer = cluster.layer,
                                           .count = pages,
                                           .purpose = PlaceFor::kClusterPages,
                                           .beside = stay,
                                           .instead = go});
    std::vector<int64_t> placed;
    for (int64_t i = 0; i < pages; ++i) {
      placed.push_back(offset + i * kPage);
      ASSERT_TRUE(used_.insert(placed.back()).second) << "somebody's place";
    }
    ASSERT_LE(offset + pages * kPage, layout_->end_bytes());
    if (!stay.empty() && offset < stay.front()) std::ranges::reverse(placed);
    let_go(go);
    cluster.places = stay;
    cluster.places.insert(cluster.places.end(), placed.begin(), placed.end());
  }

  std::unique_ptr<PairedPoolLayout> layout_;
  int64_t layers_;
  std::mt19937 random_;
  std::vector<Cluster> clusters_;
  std::set<int64_t> used_;
};

TEST(PairedPoolLayout, PagesOfAClusterAreNeighboursAtAllTimes) {
  for (const int64_t slack : {0, 2, 6}) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      SCOPED_TRACE(seed);
      const PoolOptions options = {.layers = 2, .usual_pages = 2, .slack_pages = slack};
      Lives lives(options, seed);
      for (int step = 0; step < 800 && !testing::Test::HasFatalFailure(); ++step) {
        const int64_t action = lives.clusters() < 2 ? 0 : lives.draw(0, 19);
        if (action <= 4) lives.add(lives.draw(1, 4));
        if (action > 4 && action <= 15) lives.grow(lives.draw(0, 3) == 0 ? 2 : 1);
        if (action > 15 && action <= 17) lives.split();
        if (action > 17) lives.drop();
        // They are not split when they are large, and so grow without end.
        if (step % 40 == 39) {
          while (lives.clusters() > 3) lives.drop();
        }
        lives.check();
        // A pool holds a page of a cluster that has no other.
        EXPECT_LE(lives.layout().end_bytes(), 400 * kPage);
      }
      while (lives.clusters() > 0) lives.drop();
      EXPECT_EQ(lives.layout().end_bytes(), 0) << "pools that hold nothing are given back";
    }
  }
}

TEST(PairedPoolLayout, TwoOfUsualSizeShareAPool) {
  const auto layout = pools_of({.layers = 1, .usual_pages = 2, .slack_pages = 2});
  const auto place = [&](int64_t count) {
    return layout->place({.count = count, .purpose = PlaceFor::kClusterPages}) / kPage;
  };
  EXPECT_EQ(place(2), 1);
  EXPECT_EQ(place(2), 5) << "with two free pages between them, and one at each end";
  EXPECT_EQ(layout->end_bytes(), 8 * kPage);
  EXPECT_EQ(place(3), 9) << "a pool of its own";
  EXPECT_EQ(place(2), 14) << "beside it";
}

TEST(PairedPoolLayout, APageThatIsNotFullStandsAtTheOtherEndWhenItComesAnew) {
  const auto layout = pools_of({.layers = 1, .usual_pages = 2, .slack_pages = 2});
  layout->place({.count = 2, .purpose = PlaceFor::kClusterPages});  // pages 1 and 2
  const std::vector<int64_t> stay = {kPage};
  for (int64_t old = 2; const int64_t expected : {0, 2, 0, 2}) {
    const std::vector<int64_t> go = {old * kPage};
    ASSERT_TRUE(layout->has_room_beside(stay, 1));
    const int64_t placed = layout->place(
        {.count = 1, .purpose = PlaceFor::kClusterPages, .beside = stay, .instead = go});
    EXPECT_EQ(placed / kPage, expected);
    layout->release(old * kPage);
    old = expected;
  }
}

TEST(PairedPoolLayout, GroupsStandAsWithoutPools) {
  const auto layout = pools_of({.layers = 2, .usual_pages = 2, .slack_pages = 2});
  auto plain = SequenceLayout::create(kPage, kPage, 2);
  for (int i = 0; i < 300; ++i) {
    const PlaceArgs args = {.layer = i % 2, .count = 1 + i % 11};
    ASSERT_EQ(layout->place(args), plain.value()->place(args));
    if (i % 9 != 8) continue;
    const PlaceArgs last = {.layer = 0, .count = 100};
    const int64_t offset = layout->place(last);
    ASSERT_EQ(offset, plain.value()->place(last));
    for (int64_t at = 0; at < 100; ++at) {
      layout->release(offset + at * kPage);
      plain.value()->release(offset + at * kPage);
    }
  }
}

TEST(PairedPoolLayout, TightenedTakesNoMoreThanItNeeds) {
  const auto layout = pools_of({.layers = 1, .usual_pages = 2, .slack_pages = 2});
  layout->tighten();
  for (int64_t i = 0; i < 5; ++i) layout->place({.count = 3, .purpose = PlaceFor::kClusterPages});
  EXPECT_EQ(layout->end_bytes(), 15 * kPage);
  EXPECT_FALSE(layout->has_room_beside(std::vector<int64_t>{0, kPage, 2 * kPage}, 1));
  layout->clear();
  EXPECT_EQ(layout->end_bytes(), 0);
}

}  // namespace
}  // namespace kvswap
