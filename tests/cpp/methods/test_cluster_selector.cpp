// Which clusters are chosen, beside a plain reference in double.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {
namespace {

constexpr int64_t kHeads = 6, kKvHeads = 2, kHeadDim = 8, kTokens = 200, kPageTokens = 4;
constexpr int64_t kWidth = kKvHeads * kHeadDim;

MethodOptions options_of(Score score) {
  MethodOptions options;
  options.rows = "centroid";
  options.layers = 1;
  options.heads = kHeads;
  options.kv_heads = kKvHeads;
  options.head_dim = kHeadDim;
  options.group_tokens = kPageTokens;
  options.score = score;
  options.clusters = {.cluster_tokens = 8, .cluster_tokens_max = 16};
  return options;
}

class ClusterChoice : public testing::TestWithParam<Score> {
 protected:
  ClusterChoice() : selector_(options_of(GetParam())) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    for (float& number : keys_) number = normal(generator);
    for (float& number : queries_) number = normal(generator);
    selector_.rows().set_sequences(1);
    selector_.rows().grow(0, kTokens);
    KeyRows keys;
    keys.data = keys_.data();
    keys.width = keys.stride = kWidth;
    row().clusters.enter_prompt(keys, kTokens, {});
    for (int64_t cluster = 0; cluster < row().clusters.table().count(); ++cluster) {
      const std::vector<int64_t> members = members_of(row().clusters, cluster);
      for (const int64_t token : members) row().pages.wait(token);
      const auto plan = row().pages.plan(cluster, members);
      for (const int64_t token : plan->tokens) row().pages.end_wait(token);
      row().pages.install(*plan);
    }
  }

  ClusterRow& row() { return selector_.rows().of(0, 0); }

  std::vector<int32_t> chosen(int64_t queries, int64_t pages) {
    const QueryView query = {.data = queries_.data(),
                             .batch_stride = 0,
                             .head_stride = 2 * kHeadDim,
                             .query_stride = kHeadDim,
                             .heads = kHeads,
                             .queries = queries};
    std::vector<std::vector<int32_t>> chosen;
    const Candidates candidate;
    selector_.choose({.layer = 0,
                      .query = query,
                      .groups = kTokens / kPageTokens,
                      .groups_per_query = pages,
                      .candidates = {&candidate, 1},
                      .chosen = &chosen,
                      .scale = 0.3f});
    return chosen[0];
  }

  /// What one query's clusters are worth.
  std::vector<double> importance(int64_t query) {
    const ClusterTable& table = row().clusters.table();
    std::vector<double> importance(table.count());
    std::vector<float> centroid(kWidth);
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<double> of_head(table.count());
      for (int64_t c = 0; c < table.count(); ++c) {
        table.centroid(c, centroid);
        for (int64_t d = 0; d < kHeadDim; ++d) {
          of_head[c] += queries_[(head * 2 + query) * kHeadDim + d] *
                        centroid[head / (kHeads / kKvHeads) * kHeadDim + d];
        }
      }
      const bool is_by_mass = GetParam() == Score::kMass || GetParam() == Score::kMaxMass;
      double total = 0;
      for (int64_t c = 0; is_by_mass && c < table.count(); ++c) {
        of_head[c] = table.size()[c] * std::exp(0.3 * of_head[c]);
        total += of_head[c];
      }
      for (int64_t c = 0; c < table.count(); ++c) {
        const double each = is_by_mass ? of_head[c] / total : of_head[c];
        const bool adds = GetParam() == Score::kSum || GetParam() == Score::kMass;
        importance[c] = head == 0 ? each
                        : adds    ? importance[c] + each
                                  : std::max(importance[c], each);
      }
    }
    return importance;
  }

  /// The slots of the best clusters that fit.
  std::set<int32_t> expected(int64_t query, int64_t pages) {
    const std::vector<double> value = importance(query);
    std::vector<int32_t> order(value.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return value[a] > value[b]; });
    std::set<int32_t> slots;
    for (const int32_t cluster : order) {
      pages -= row().pages.pages(cluster);
      if (pages < 0) break;
      row().pages.each_page(cluster, [&](int64_t slot) { slots.insert(page_id(slot)); });
    }
    return slots;
  }

  ClusterSelector selector_;
  std::vector<float> keys_ = std::vector<float>(kTokens * kWidth);
  std::vector<float> queries_ = std::vector<float>(kHeads * 2 * kHeadDim);
};

TEST_P(ClusterChoice, TakesTheBestClustersWholeUntilOneDoesNotFit) {
  for (int64_t pages = 4; pages < 60; ++pages) {
    const std::set<int32_t> best = expected(0, pages);
    ASSERT_EQ(chosen(1, pages), std::vector<int32_t>(best.begin(), best.end())) << pages;
  }
}

TEST_P(ClusterChoice, SeveralQueriesTakeTheUnionOfTheirs) {
  std::set<int32_t> both = expected(0, 12);
  both.merge(expected(1, 12));
  EXPECT_EQ(chosen(2, 12), std::vector<int32_t>(both.begin(), both.end()));
}

TEST_P(ClusterChoice, OneThatIsLargerThanItAllGetsWhatFits) {
  const std::vector<int32_t> one = chosen(1, 1);
  ASSERT_EQ(one.size(), 1u);
  const std::vector<double> value = importance(0);
  const int64_t best = std::max_element(value.begin(), value.end()) - value.begin();
  EXPECT_EQ(slot_of_page(one[0]) / pages_a_cluster(options_of(GetParam())), best);
}

TEST_P(ClusterChoice, ProductsThatAreNoNumbersHaveAnOrder) {
  // Infinite for some centroids, of either sign, and none for the others.
  queries_[0] = queries_[1] = std::numeric_limits<float>::infinity();
  const std::vector<int32_t> one = chosen(1, 20);
  EXPECT_LE(one.size(), 20u);
  EXPECT_FALSE(one.empty());
  EXPECT_EQ(chosen(1, 20), one);
}

std::string name_of(const testing::TestParamInfo<Score>& info) {
  const char* names[] = {"sum", "max", "mass", "max_mass"};
  return names[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Scores, ClusterChoice,
                         testing::Values(Score::kSum, Score::kMax, Score::kMass, Score::kMaxMass),
                         name_of);

}  // namespace
}  // namespace kvswap
