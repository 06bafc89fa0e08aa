#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "methods/clusters/cluster_pages.h"

namespace kvswap {
namespace {

constexpr int64_t kPageTokens = 4;
constexpr int64_t kPagesACluster = 3;

/// Where tokens stand, by a map.
struct Model {
  std::map<int64_t, int64_t> slot_of;      // tokens in pages
  std::vector<std::set<int64_t>> members;  // [clusters]
};

void check(const ClusterPages& pages, const Model& model, int64_t tokens) {
  std::map<int64_t, int64_t> held;
  for (int64_t token = 0; token < tokens; ++token) {
    const auto found = model.slot_of.find(token);
    if (found == model.slot_of.end()) {
      ASSERT_LT(pages.place(token), 0);
      continue;
    }
    ASSERT_EQ(pages.place(token) / kPageTokens, found->second);
    ASSERT_TRUE(pages.mask(found->second) >> pages.place(token) % kPageTokens & 1);
    ++held[found->second];
  }
  for (size_t slot = 0; slot < model.members.size() * kPagesACluster; ++slot) {
    ASSERT_EQ(std::popcount(pages.mask(static_cast<int64_t>(slot))),
              held[static_cast<int64_t>(slot)]);
  }
}

TEST(ClusterPages, TokensStandWhereTheyWerePackedLast) {
  std::mt19937 random(3);
  const auto draw = [&](size_t most) { return random() % (most + 1); };
  constexpr int64_t kTokens = 60;
  ClusterPages pages(kPageTokens, kPagesACluster);
  pages.grow(kTokens, 12);
  Model model;
  model.members.resize(12);
  int64_t next = 0;
  int packed = 0;
  for (int i = 0; i < 3000 && !testing::Test::HasFatalFailure(); ++i) {
    const int64_t cluster = static_cast<int64_t>(draw(11));
    std::set<int64_t>& members = model.members[cluster];
    if (draw(2) == 0 && next < kTokens && members.size() < kPageTokens * kPagesACluster) {
      pages.wait(next);
      ASSERT_EQ(pages.waiting().back(), next);
      members.insert(next++);
    } else if (draw(60) == 0) {
      // What is cropped waits no more, then stands nowhere.
      next -= static_cast<int64_t>(draw(next));
      for (int64_t token = next; token < kTokens; ++token) {
        if (pages.waiting_at(token) >= 0) pages.end_wait(token);
      }
      for (const int32_t slot : pages.truncate(next)) ASSERT_EQ(pages.mask(slot), 0u);
      std::erase_if(model.slot_of, [&](const auto& each) { return each.first >= next; });
      for (auto& each : model.members) {
        std::erase_if(each, [&](int64_t token) { return token >= next; });
      }
    } else if (const auto plan =
                   pages.plan(cluster, std::vector<int64_t>(members.begin(), members.end()))) {
      ++packed;
      ASSERT_EQ((plan->tokens.size() + kPageTokens - 1) / kPageTokens, plan->slots.size());
      std::set<int64_t> before;
      for (const int64_t token : plan->tokens) {
        if (model.slot_of.contains(token)) before.insert(model.slot_of[token]);
        if (pages.waiting_at(token) >= 0) pages.end_wait(token);
      }
      const std::vector<int32_t> emptied = pages.install(*plan);
      for (size_t at = 0; at < plan->tokens.size(); ++at) {
        ASSERT_EQ(plan->slots[at / kPageTokens] / kPagesACluster, cluster);
        model.slot_of[plan->tokens[at]] = plan->slots[at / kPageTokens];
      }
      for (const int32_t slot : emptied) {
        ASSERT_TRUE(before.contains(slot));
        ASSERT_EQ(pages.mask(slot), 0u);
      }
      // Nothing is left to pack, and no page is wasted.
      ASSERT_FALSE(pages.plan(cluster, std::vector<int64_t>(members.begin(), members.end())));
      ASSERT_EQ(pages.pages(cluster), (std::ssize(members) + kPageTokens - 1) / kPageTokens);
    }
    check(pages, model, kTokens);
  }
  EXPECT_GT(packed, 100);
}

TEST(ClusterPages, ASplitLeavesHolesUntilItIsPacked) {
  ClusterPages pages(kPageTokens, kPagesACluster);
  pages.grow(20, 4);
  std::vector<int64_t> all;
  for (int64_t token = 0; token < 10; ++token) {
    pages.wait(token);
    all.push_back(token);
  }
  const auto first = pages.plan(0, all);
  for (const int64_t token : first->tokens) pages.end_wait(token);
  EXPECT_TRUE(pages.install(*first).empty());
  EXPECT_EQ(pages.pages(0), 3);
  // Tokens 1, 5, 9 are another cluster's now, and stand in this one's pages.
  const std::vector<int64_t> retained = {0, 2, 3, 4, 6, 7, 8};
  const std::vector<int64_t> gone = {1, 5, 9};
  EXPECT_FALSE(pages.plan(0, retained)) << "its slots hold the other's tokens";
  const auto other = pages.plan(1, gone);
  ASSERT_TRUE(other);
  EXPECT_TRUE(pages.install(*other).empty());
  EXPECT_EQ(pages.mask(0), 0b1101u);
  EXPECT_EQ(pages.mask(2), 0b0001u);
  const auto again = pages.plan(0, retained);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->slots.size(), 2u);
  EXPECT_EQ(pages.install(*again), (std::vector<int32_t>{2}));
  EXPECT_EQ(pages.pages(0), 2);
}

}  // namespace
}  // namespace kvswap
