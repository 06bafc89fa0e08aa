#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "memory/page_map.h"

namespace kvswap {
namespace {

/// The same book-keeping with a map and a sort.
class ModelMap {
 public:
  ModelMap(int32_t first, int32_t pages, Replacement replacement)
      : first_(first), pages_(pages), replacement_(replacement) {}

  std::vector<PageMap::Assignment> plan(const std::vector<uint64_t>& keys) {
    ++step_;
    if (replacement_ == Replacement::kNone) pages_.assign(pages_.size(), {});
    std::vector<PageMap::Assignment> result;
    for (const uint64_t key : keys) {
      const auto it = std::find_if(pages_.begin(), pages_.end(),
                                   [&](const PageState& p) { return p.is_filled && p.key == key; });
      result.push_back({-1, it == pages_.end()});
      if (it == pages_.end()) continue;
      it->used_step = step_;
      result.back().page = first_ + static_cast<int32_t>(it - pages_.begin());
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!result[i].is_load) continue;
      const size_t page = leaving();
      pages_[page] = {keys[i], step_, step_, true};
      result[i].page = first_ + static_cast<int32_t>(page);
    }
    return result;
  }
  void rate(int32_t page, float score) { pages_[page - first_].score = score; }
  void forget(uint64_t key) {
    for (PageState& page : pages_) {
      if (page.is_filled && page.key == key) page = {};
    }
  }
  std::vector<uint64_t> keys() const {
    std::vector<uint64_t> keys;
    for (const PageState& page : pages_) {
      if (page.is_filled) keys.push_back(page.key);
    }
    return keys;
  }

 private:
  /// Empty pages first, then whom the policy names; never one that this step uses.
  size_t leaving() const {
    size_t best = pages_.size();
    uint64_t best_rank = ~uint64_t{0};
    for (size_t i = 0; i < pages_.size(); ++i) {
      const PageState& page = pages_[i];
      if (page.is_filled && page.used_step == step_) continue;
      uint64_t rank = 0;
      if (page.is_filled && replacement_ == Replacement::kFifo) rank = 1 + page.loaded_step;
      if (page.is_filled && replacement_ == Replacement::kLru) rank = 1 + page.used_step;
      if (page.is_filled && replacement_ == Replacement::kUnused) rank = 1;
      if (page.is_filled && replacement_ == Replacement::kScore) rank = 1 + 4 * page.score;
      if (rank < best_rank) {
        best = i;
        best_rank = rank;
      }
    }
    return best;
  }

  int32_t first_;
  std::vector<PageState> pages_;
  Replacement replacement_;
  uint64_t step_ = 0;
};

class PageMapTest : public testing::TestWithParam<Replacement> {};

TEST_P(PageMapTest, EqualsAModel) {
  for (const int32_t pages : {1, 2, 3, 5, 8, 33}) {
    SCOPED_TRACE(pages);
    std::mt19937_64 random(pages);
    PageMap map(100, pages, GetParam());
    ModelMap model(100, pages, GetParam());
    std::vector<PageMap::Assignment> assignments;
    for (int step = 0; step < 1500; ++step) {
      std::set<uint64_t> wanted;
      const size_t count = random() % (pages + 1);
      // Keys of all sizes, as records have them: a serial above, a place below.
      while (wanted.size() < count) {
        const uint64_t draw = random() % (3 * pages);
        wanted.insert(draw << 32 | draw % 4);
      }
      std::vector<uint64_t> keys(wanted.begin(), wanted.end());
      std::shuffle(keys.begin(), keys.end(), random);
      assignments.resize(keys.size());
      map.plan(keys, assignments);
      const auto expected = model.plan(keys);
      for (size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(assignments[i].page, expected[i].page) << "step " << step;
        ASSERT_EQ(assignments[i].is_load, expected[i].is_load);
        ASSERT_EQ(map.find(keys[i]), expected[i].page);
      }
      for (const PageMap::Assignment& assigned : assignments) {
        const float score = static_cast<float>(random() % 8) / 4;  // with ties
        map.rate(assigned.page, score);
        model.rate(assigned.page, score);
      }
      if (random() % 3 == 0) {
        const uint64_t draw = random() % (3 * pages);
        const uint64_t key = draw << 32 | draw % 4;
        map.forget(key);
        model.forget(key);
        ASSERT_EQ(map.find(key), -1);
      }
      for (const uint64_t key : model.keys()) ASSERT_GE(map.find(key), 100);
      if (step == 1000) {
        map.clear();
        model = ModelMap(100, pages, GetParam());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replacements, PageMapTest,
                         testing::Values(Replacement::kFifo, Replacement::kLru,
                                         Replacement::kUnused, Replacement::kNone,
                                         Replacement::kScore));

TEST(PageMap, WithoutReuseNothingIsHitTwice) {
  PageMap map(0, 4, Replacement::kNone);
  const std::vector<uint64_t> keys{7, 8};
  std::vector<PageMap::Assignment> assignments(2);
  for (int step = 0; step < 2; ++step) {
    map.plan(keys, assignments);
    EXPECT_TRUE(assignments[0].is_load && assignments[1].is_load) << "step " << step;
  }
}

TEST(PageMap, WhatAStepUsesNeverLeavesInThatStep) {
  PageMap map(0, 2, Replacement::kFifo);
  PageMap::Assignment first[2];
  map.plan(std::vector<uint64_t>{1, 2}, first);
  PageMap::Assignment second[2];
  map.plan(std::vector<uint64_t>{3, 1}, second);  // 1 is the oldest, but wanted
  EXPECT_EQ(second[1].page, first[0].page);
  EXPECT_FALSE(second[1].is_load);
  EXPECT_EQ(second[0].page, first[1].page);
  EXPECT_EQ(map.find(2), -1);
}

TEST(PageMap, WhoWasPaidLeastLeavesFirst) {
  PageMap map(10, 3, Replacement::kScore);
  PageMap::Assignment assigned[3];
  map.plan(std::vector<uint64_t>{1, 2, 3}, assigned);
  const float scores[] = {0.5f, 1e-30f, 0.75f};
  for (int i = 0; i < 3; ++i) map.rate(assigned[i].page, scores[i]);
  PageMap::Assignment next[1];
  map.plan(std::vector<uint64_t>{4}, next);
  EXPECT_EQ(next[0].page, assigned[1].page);
  map.plan(std::vector<uint64_t>{5}, next);
  EXPECT_EQ(next[0].page, assigned[1].page) << "nobody has rated 4 yet";
  map.rate(next[0].page, 2.0f);
  map.plan(std::vector<uint64_t>{6}, next);
  EXPECT_EQ(next[0].page, assigned[0].page) << "0.5 of 0.5, 2 and 0.75";
  EXPECT_EQ(map.find(3), assigned[2].page);
}

TEST(PageMapDeathTest, MoreThanThePagesIsOurMistake) {
  PageMap map(0, 2, Replacement::kFifo);
  PageMap::Assignment assignments[3];
  EXPECT_DEATH(map.plan(std::vector<uint64_t>{1, 2, 3}, assignments), "does not hold");
}

TEST(Replacement, IsParsedByName) {
  EXPECT_EQ(parse_replacement("fifo"), Replacement::kFifo);
  EXPECT_EQ(parse_replacement("lru"), Replacement::kLru);
  EXPECT_EQ(parse_replacement("unused"), Replacement::kUnused);
  EXPECT_EQ(parse_replacement("none"), Replacement::kNone);
  EXPECT_EQ(parse_replacement("score"), Replacement::kScore);
  EXPECT_EQ(parse_replacement("FIFO"), std::nullopt);
}

TEST(PageMap, OfClustersLargeOnesLeaveFirstAndThoseUpdatedLast) {
  PageMap map(0, 8, Replacement::kClusters);
  const std::vector<uint64_t> keys = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<PageMap::Assignment> at(8);
  map.plan(keys, at);
  for (int32_t page = 0; page < 8; ++page) map.describe(page, page < 3 ? 4 : 2);
  std::vector<PageMap::Assignment> one(1);
  EXPECT_EQ(map.rename(1, 11), 0);
  map.plan(std::vector<uint64_t>{8}, one);
  // A quarter of the pages may stay for it: these two, not the one that was updated before.
  EXPECT_EQ(map.rename(2, 12), 1);
  EXPECT_EQ(map.rename(4, 14), 3);
  EXPECT_EQ(map.find(2), -1);
  std::vector<int32_t> left;
  for (uint64_t key = 20; key < 26; ++key) {
    map.plan(std::vector<uint64_t>{key}, one);
    left.push_back(one[0].page);
  }
  EXPECT_EQ(left, (std::vector<int32_t>{0, 2, 4, 5, 6, 7}));
  EXPECT_EQ(map.find(12), 1);
  EXPECT_EQ(map.find(14), 3);
}

}  // namespace
}  // namespace kvswap
