// Keys that are NaN or infinite, under every kind of rows.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "methods/one_choice.h"
#include "methods/selection/selector_factory.h"
#include "methods/selector_on_device.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 4;
constexpr int64_t kDim = 8;
constexpr int64_t kGroup = 4;
constexpr int64_t kTokens = 1100 * kGroup;  // of several chunks
constexpr int64_t kRank = 12;
constexpr int64_t kChosen = 3;

struct Scoring {
  std::string rows;
  Score score;
  DType dtype;
  int64_t score_columns = 0;
};

MethodOptions options_of(const Scoring& of) {
  return {.rows = of.rows,
          .layers = 1,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .group_tokens = kGroup,
          .summary_dtype = of.dtype,
          .score = of.score,
          .score_columns = of.score_columns,
          .score_share = of.score_columns > 0 ? 0.1 : 0.0};
}

std::vector<float> normal_numbers(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<int32_t> choice(Selector& selector, const std::vector<float>& keys,
                            const std::vector<float>& query, bool takes_projections) {
  if (takes_projections) {
    const std::vector<float> projection = normal_numbers(kKvHeads * kDim * kRank, 3);
    EXPECT_TRUE(selector.set_projection(0, kRank, projection.data(), projection.data()).is_ok());
  }
  selector.summaries().set_sequences(1);
  const Status appended = selector.append(
      {.layer = 0, .sequence = 0, .keys = {keys.data(), kTokens * kDim, kDim}, .tokens = kTokens});
  EXPECT_TRUE(appended.is_ok());
  PaddingMask valid;
  valid.append(kTokens, nullptr);
  return choose(selector, {.query = query,
                           .heads = kHeads,
                           .valid = valid,
                           .groups = kTokens / kGroup,
                           .k = kChosen,
                           .scale = 0.1f});
}

std::vector<Scoring> scorings() {
  std::vector<Scoring> all;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
    for (const std::string rows : {"low_rank", "mean", "box"}) {
      for (const Score score : {Score::kSum, Score::kMax}) all.push_back({rows, score, dtype});
    }
    all.push_back({"low_rank", Score::kMass, dtype});
    all.push_back({"low_rank", Score::kMaxMass, dtype});
    all.push_back({"low_rank", Score::kSum, dtype, 4});
  }
  for (const Score score : {Score::kSum, Score::kMax, Score::kMass}) {
    all.push_back({"low_rank", score, DType::kInt4});
  }
  return all;
}

std::string name_of(const Scoring& of) {
  return of.rows + ", score " + std::to_string(static_cast<int>(of.score)) + ", dtype " +
         std::to_string(static_cast<int>(of.dtype));
}

/// Groups 12 and 1001 hold such a key; the third that is chosen is the best of the others, who are
/// scored as if there were none.
TEST(NoNumbers, AGroupWithAKeyThatIsNoFiniteNumberIsChosenFirst) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> query = normal_numbers(kHeads * kDim, 2);
  for (const Scoring& of : scorings()) {
    const MethodOptions options = options_of(of);
    const bool takes_projections = SummaryKind::find(of.rows)->takes_projections;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
      std::vector<float> keys = normal_numbers(kKvHeads * kTokens * kDim, 1);
      const auto others = choice(*make_selector(options, nullptr), keys, query, takes_projections);
      keys[(1 * kTokens + 50) * kDim + 3] = bad;
      keys[(0 * kTokens + 1001 * kGroup) * kDim] = bad;
      const auto on_host = choice(*make_selector(options, nullptr), keys, query, takes_projections);
      ASSERT_EQ(on_host.size(), 3U);
      EXPECT_EQ(std::ranges::count(on_host, 12) + std::ranges::count(on_host, 1001), 2)
          << name_of(of) << ", " << bad;
      for (const int32_t group : on_host) {
        const bool is_of_others = std::ranges::count(others, group) > 0;
        EXPECT_TRUE(group == 12 || group == 1001 || is_of_others) << name_of(of) << ", " << bad;
      }
      OnDevice device({.delay_us_max = 50}, options,
                      {.batch = 1,
                       .queries = 1,
                       .groups = kTokens / kGroup,
                       .k = kChosen,
                       .rank = takes_projections ? kRank : 2 * kKvHeads * kDim,
                       .heads = of.score == Score::kSum ? 0 : kHeads});
      EXPECT_EQ(choice(device.selector(), keys, query, takes_projections), on_host)
          << name_of(of) << ", " << bad;
    }
  }
}

/// By mass the other heads decide; where heads are summed nobody can.
TEST(NoNumbers, AHeadWhoseQueryIsNoNumberHasNoSayInMass) {
  const std::vector<float> keys = normal_numbers(kKvHeads * kTokens * kDim, 1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kInt4}) {
    const MethodOptions options = options_of({"low_rank", Score::kMass, dtype});
    for (const int64_t head : {int64_t{0}, kHeads - 1}) {
      std::vector<float> query = normal_numbers(kHeads * kDim, 2);
      query[head * kDim] = std::numeric_limits<float>::quiet_NaN();
      const auto chosen = choice(*make_selector(options, nullptr), keys, query, true);
      EXPECT_EQ(chosen.size(), 3U);
      EXPECT_NE(chosen, (std::vector<int32_t>{0, 1, 2})) << "all alike";
    }
  }
}

}  // namespace
}  // namespace kvswap
