#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "methods/retention/cake.h"
#include "methods/retention/compresskv.h"

namespace kvswap {
namespace {

using Tokens = std::vector<int64_t>;

int64_t sum(const Tokens& tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}

/// By CAKE, of layers with these preferences: dispersion alone makes them.
Tokens divide_by_preference(const std::vector<double>& preferences, const Tokens& candidates,
                            int64_t total) {
  RetentionOptions options;
  options.preference_temperatures = {1, 1};
  std::vector<LayerPrompt> layers;
  for (size_t layer = 0; layer < preferences.size(); ++layer) {
    layers.push_back({{.dispersion = preferences[layer], .change = 1}, candidates[layer]});
  }
  return Cake(options).divide(layers, total);
}

double preference(const AttentionSpread& spread, const std::vector<double>& temperatures) {
  RetentionOptions options;
  options.preference_temperatures = temperatures;
  return Cake(options).preference(spread);
}

TEST(LayerTokens, APreferenceIsTheProductOfRoots) {
  AttentionSpread spread;
  for (const double received : {0.5, 0.25, 0.0, 0.25}) spread.add(received);
  EXPECT_NEAR(spread.dispersion, 1.5 * std::log(2.0), 1e-12);
  EXPECT_EQ(preference(spread, {1.0, 1.0}), 0) << "nothing changes";
  spread.change = 0.04;
  EXPECT_NEAR(preference(spread, {1.0, 1.0}), spread.dispersion * 0.04, 1e-12);
  EXPECT_NEAR(preference(spread, {1.0, 2.0}), spread.dispersion * 0.2, 1e-12);
}

TEST(LayerTokens, LayersDivideInProportion) {
  const std::vector<double> preferences = {1, 2, 1};
  EXPECT_EQ(divide_by_preference(preferences, Tokens{90, 90, 90}, 100), (Tokens{25, 50, 25}));
  // What the first cannot take, and what rounding left over, go to the others alike.
  EXPECT_EQ(divide_by_preference(preferences, Tokens{5, 90, 90}, 101), (Tokens{5, 61, 35}));
  EXPECT_EQ(divide_by_preference(preferences, Tokens{5, 5, 5}, 100), (Tokens{5, 5, 5}));
  // Where all are preferred alike by nothing each has as many.
  EXPECT_EQ(divide_by_preference({0.0, 0.0}, Tokens{9, 9}, 7), (Tokens{4, 3}));
  EXPECT_EQ(divide_by_preference({}, {}, 7), Tokens{});
}

TEST(LayerTokens, AnotherLayerLeavesNobodyMore) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> preferences;
    const Tokens limits(6, 1 + static_cast<int64_t>(random() % 60));
    const auto total = static_cast<int64_t>(6 * (1 + random() % 20));
    Tokens before;
    for (size_t layer = 0; layer < limits.size(); ++layer) {
      preferences.push_back(std::uniform_real_distribution<double>(0.0, 1.0)(random));
      const Tokens now = divide_by_preference(preferences, limits, total);
      EXPECT_LE(sum(now), total);
      for (size_t other = 0; other < layer; ++other) EXPECT_LE(now[other], before[other]);
      before = now;
    }
  }
}

TEST(LayerTokens, SharesLeaveNobodyLessThanTheLeast) {
  const std::vector<double> shares = {0.1, 0.6, 0.0, 0.3};
  const Tokens tokens = divide_by_share({shares, 100, 24, 200});
  EXPECT_EQ(sum(tokens), 400);
  EXPECT_EQ(tokens, (Tokens{56, 200, 26, 118}));
  EXPECT_EQ(divide_by_share({shares, 100, 100, 200}), (Tokens{100, 100, 100, 100}));
  EXPECT_EQ(sum(divide_by_share({std::vector{1.0, 1.0, 1.0}, 10, 0, 10})), 30);
}

}  // namespace
}  // namespace kvswap
