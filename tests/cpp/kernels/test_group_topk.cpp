#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/group_topk.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class GroupMax : public KernelTest {};
class TopK : public KernelTest {};

TEST_P(GroupMax, MatchesReference) {
  for (int64_t group_tokens = 1; group_tokens <= 64; ++group_tokens) {
    for (const int64_t tokens : {0, 1, 7, 16, 63, 64, 129, 1000, 4096}) {
      auto scores = random_elements<float>(tokens, tokens + group_tokens);
      for (int64_t i = 0; i < tokens; i += 5) scores[i] = i % 2 ? kNan : -kInfinity;
      const int64_t groups = (tokens + group_tokens - 1) / group_tokens;
      std::vector<float> maxima(groups + 1, 7.0f);
      group_max({.scores = scores.data(),
                 .group_scores = maxima.data(),
                 .tokens = tokens,
                 .group_tokens = group_tokens});
      for (int64_t group = 0; group < groups; ++group) {
        float expected = -kInfinity;
        for (int64_t t = group * group_tokens; t < std::min(tokens, (group + 1) * group_tokens);
             ++t) {
          expected = std::fmax(expected, std::isnan(scores[t]) ? kInfinity : scores[t]);
        }
        ASSERT_EQ(maxima[group], expected) << group_tokens << " " << tokens << " " << group;
      }
      EXPECT_EQ(maxima[groups], 7.0f);
    }
  }
}

std::vector<int32_t> reference_top_k(std::vector<float> scores, int64_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int32_t i) { return !(scores[i] > -kInfinity); });
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min<int64_t>(k, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

void expect_same_choice(const std::vector<float>& scores, int64_t k) {
  std::vector<int32_t> indices(k + 1, -7);
  const int64_t count = top_k({.scores = scores.data(),
                               .indices = indices.data(),
                               .count = static_cast<int64_t>(scores.size()),
                               .k = k});
  EXPECT_EQ(indices.back(), -7) << "written past the end";
  indices.resize(count);
  EXPECT_EQ(indices, reference_top_k(scores, k)) << scores.size() << " " << k;
}

TEST_P(TopK, RandomScores) {
  for (const int64_t count : {0, 1, 15, 16, 17, 100, 5000, 100000}) {
    for (const int64_t k : {0, 1, 2, 100, 4096}) {
      expect_same_choice(random_elements<float>(count, count + k), k);
    }
  }
}

TEST_P(TopK, ManyTies) {
  auto scores = random_elements<float>(20000, 5);
  for (float& score : scores) score = std::round(score);
  for (const int64_t k : {1, 99, 1000, 4096}) expect_same_choice(scores, k);
  expect_same_choice(std::vector<float>(9000, 1.5f), 100);
}

TEST_P(TopK, SortedScores) {
  auto scores = random_elements<float>(20000, 6);
  std::sort(scores.begin(), scores.end());
  expect_same_choice(scores, 200);
  std::reverse(scores.begin(), scores.end());
  expect_same_choice(scores, 200);
}

TEST_P(TopK, NeverChoosesMinusInfinityOrNan) {
  auto scores = random_elements<float>(3000, 7);
  for (size_t i = 0; i < scores.size(); ++i) {
    if (i % 3 == 0) scores[i] = -kInfinity;
    if (i % 3 == 1) scores[i] = i % 2 ? kNan : -kNan;
  }
  scores[2] = kInfinity;
  expect_same_choice(scores, 50);
  expect_same_choice(scores, 2000);
  expect_same_choice(std::vector<float>(40, -kInfinity), 5);
}

TEST_P(TopK, ZerosOfBothSignsAreEqual) {
  expect_same_choice({-0.0f, 0.0f, -1.0f, 0.0f, -0.0f}, 1);
  expect_same_choice({-1.0f, -0.0f, 0.0f, 0.0f, -0.0f}, 2);
}

KVSWAP_EVERY_LEVEL(GroupMax);
KVSWAP_EVERY_LEVEL(TopK);

}  // namespace
}  // namespace kvswap
