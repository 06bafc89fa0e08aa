#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "methods/retention/top_k_overlap.h"

namespace kvswap {
namespace {

using Of = TopKOverlap::Of;

void add_all(TopKOverlap& overlap, int64_t head, Of query, const std::vector<float>& importance) {
  for (size_t i = 0; i < importance.size(); ++i) {
    overlap.add(head, query, static_cast<int32_t>(i), importance[i]);
  }
}

TEST(TopKOverlap, CountsWhatBothWouldTake) {
  TopKOverlap overlap(2, 3);
  add_all(overlap, 0, Of::kFirst, {5, 0, 4, 1, 3, 2});
  add_all(overlap, 0, Of::kLast, {0, 5, 4, 3, 1, 2});  // 0, 2, 4 and 1, 2, 3
  add_all(overlap, 1, Of::kFirst, {1, 1, 1, 1, 1, 1});
  add_all(overlap, 1, Of::kLast, {1, 2, 1, 0, 1, 1});  // the lower of equals: 0, 1, 2 of both
  EXPECT_EQ(overlap.mean(), (1 + 3) / 2.0);
}

TEST(TopKOverlap, OfFewerTokensIsAllOfThem) {
  TopKOverlap overlap(1, 100);
  add_all(overlap, 0, Of::kFirst, {1, 2, 3});
  add_all(overlap, 0, Of::kLast, {3, 2, 0});
  EXPECT_EQ(overlap.mean(), 3);
  TopKOverlap none(3, 4);
  EXPECT_EQ(none.mean(), 0);
}

TEST(TopKOverlap, EqualsASort) {
  std::mt19937_64 random(4);
  for (int64_t k = 1; k < 60; k += 7) {
    TopKOverlap overlap(1, k);
    std::vector<std::set<int32_t>> best;
    for (const Of query : {Of::kFirst, Of::kLast}) {
      std::vector<float> importance(50);
      std::set<std::pair<float, int32_t>> order;
      for (int32_t i = 0; i < 50; ++i) {
        importance[i] = static_cast<float>(random() % 9);
        order.insert({-importance[i], i});
      }
      add_all(overlap, 0, query, importance);
      best.emplace_back();
      for (const auto& [_, position] : order) {
        if (static_cast<int64_t>(best.back().size()) < k) best.back().insert(position);
      }
    }
    int64_t agreed = 0;
    for (const int32_t position : best[0]) agreed += static_cast<int64_t>(best[1].count(position));
    EXPECT_EQ(overlap.mean(), static_cast<double>(agreed)) << k;
  }
}

}  // namespace
}  // namespace kvswap
