#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "methods/retention/arkv.h"
#include "methods/retention/cake.h"
#include "methods/retention/key_outliers.h"
#include "methods/retention/retained_tokens.h"
#include "methods/retention/snapkv.h"

namespace kvswap {
namespace {

using Positions = std::vector<int32_t>;

PaddingMask all_valid(int64_t positions) {
  PaddingMask valid;
  valid.append(positions, nullptr);
  return valid;
}

/// In rising order.
Positions most_attended(const RetainArgs& args) {
  Positions retained = by_attention(args);
  std::sort(retained.begin(), retained.end());
  return retained;
}

TEST(RetentionKind, AreFoundByName) {
  for (const RetentionKind* kind : RetentionKind::all()) {
    EXPECT_EQ(RetentionKind::find(kind->name), kind);
    EXPECT_EQ(kind->keeps_tokens, kind->make != nullptr) << kind->name;
  }
  EXPECT_EQ(RetentionKind::find("oldest"), nullptr);
  EXPECT_FALSE(RetentionKind::find("newest")->keeps_tokens);
  EXPECT_TRUE(RetentionKind::find("heavy")->accumulates);
}

TEST(BlockScores, StandInARowOrAtPositions) {
  std::vector<float> scores(8, 0.0f);
  const Positions positions = {7, 0};
  BlockScores(scores.data(), 2)[1] = 3;
  BlockScores(scores.data(), 2, positions.data())[0] = 7;
  EXPECT_EQ(scores, (std::vector<float>{0, 0, 0, 3, 0, 0, 0, 7}));
}

/// What tokens score by one head of a policy.
std::vector<float> scores_of(const RetentionPolicy& policy, const HeadAttention& attention) {
  std::vector<float> scores(attention.sums.size(), 1.0f);  // which is added to
  policy.add_scores(attention, {scores.data(), 0});
  return scores;
}

TEST(SnapKv, ScoresByTheHeadsThatAreAsked) {
  const std::vector<float> sums = {0.5f, 2};
  RetentionOptions options;
  options.query_heads = 4;
  const SnapKv all(options);
  EXPECT_FALSE(all.scores_query_heads());
  EXPECT_EQ(scores_of(all, {.layer = 1, .head = 2, .sums = sums}), (std::vector<float>{1.5f, 3}));
  options.scoring_heads = {1, 6};
  const SnapKv some(options);
  EXPECT_TRUE(some.scores_query_heads());
  EXPECT_EQ(scores_of(some, {.layer = 1, .head = 2, .sums = sums}), (std::vector<float>{1.5f, 3}));
  EXPECT_EQ(scores_of(some, {.layer = 0, .head = 2, .sums = sums}), (std::vector<float>{1, 1}));
}

TEST(Cake, ScoresTheMeanAndTheVarianceOfQueries) {
  const std::vector<float> sums = {4, 4}, squares = {8, 16};  // of {2, 2} and {4, 0}
  RetentionOptions options;
  options.variance_weight = 0.5;
  const HeadAttention two = {.samples = 2, .sums = sums, .squares = squares};
  EXPECT_EQ(sample_variance(two, 0), 0);
  EXPECT_EQ(sample_variance(two, 1), 8);
  EXPECT_EQ(scores_of(Cake(options), two), (std::vector<float>{3, 7}));
  const HeadAttention one = {.samples = 1, .sums = sums, .squares = squares};
  EXPECT_EQ(scores_of(Cake(options), one), (std::vector<float>{5, 5}));
}

TEST(Arkv, SharesItsRoomByThePromptsQuality) {
  RetentionOptions options;
  options.ratio = 0.25;
  EXPECT_EQ(Arkv(options).share_in_dtype(2.0, 4.0), 0.25) << "as it is set";
  options.ratio.reset();
  options.low_watermark = 0.5;
  const Arkv measured(options);
  EXPECT_EQ(measured.share_in_dtype(2.0, 4.0), 0.5);
  EXPECT_EQ(measured.share_in_dtype(std::nullopt, 4.0), 1.0) << "nothing was measured";
  EXPECT_EQ(measured.share_in_dtype(0.0, 0.0), 1.0);
  const Positions positions = {3, 4, 8, 9};
  const std::vector<float> scores = {1, 2, 9, 0};
  EXPECT_EQ(measured.survivors(positions, scores), (Positions{8, 4}));
}

TEST(KeyOutliers, ScoreAllTokensOfAGroupAlikeAndRetainWhatScoresNothing) {
  const std::vector<float> keys = {1, 0, 0, 1};  // [tokens, head_dim]
  std::vector<float> scores(2, -1.0f);
  const KeyOutliers policy(RetentionOptions{});
  policy.score_keys(
      {.keys = {reinterpret_cast<const std::byte*>(keys.data()), 4, 2, DType::kFloat32},
       .kv_heads = 1,
       .tokens = 2,
       .head_dim = 2,
       .valid = 3},
      scores);
  EXPECT_NEAR(scores[0], 1 - std::sqrt(0.5f), 1e-6);
  EXPECT_EQ(scores[0], scores[1]);
  const PaddingMask valid = all_valid(2);
  const std::vector<float> none = {0, 0};
  EXPECT_EQ(policy.select({.mass = none, .valid = &valid, .group_tokens = 2, .tokens = 2}),
            (Positions{0, 1}));
}

TEST(PoolNeighbours, AddsUpWhatStandsBeside) {
  std::vector<float> mass = {1, 2, 3, 4, 5};
  pool_neighbours(mass, 3);
  EXPECT_EQ(mass, (std::vector<float>{3, 6, 9, 12, 9}));
  mass = {1, 2, 3, 4, 5};
  pool_neighbours(mass, 2);  // itself and the next
  EXPECT_EQ(mass, (std::vector<float>{3, 5, 7, 9, 5}));
  pool_neighbours(mass, 1);
  EXPECT_EQ(mass, (std::vector<float>{3, 5, 7, 9, 5}));
  std::vector<float> none;
  pool_neighbours(none, kKeepPoolMax);
}

TEST(PoolNeighbours, IsASumOverAnyNumberOfThem) {
  std::mt19937_64 random(1);
  for (int64_t pool = 1; pool <= kKeepPoolMax; ++pool) {
    std::vector<float> mass(100);
    for (float& value : mass) value = static_cast<float>(random() % 16);
    const std::vector<float> before = mass;
    pool_neighbours(mass, pool);
    for (int64_t i = 0; i < 100; ++i) {
      float sum = 0;
      for (int64_t j = i - (pool - 1) / 2; j <= i + pool / 2; ++j) {
        if (j >= 0 && j < 100) sum += before[j];
      }
      ASSERT_EQ(mass[i], sum) << pool << " at " << i;
    }
  }
}

TEST(MostAttended, AreTheFirstOfThoseWithMostMass) {
  const PaddingMask valid = all_valid(8);
  const std::vector<float> mass = {5, 1, 3, 3, 9, 3, 0, 1};
  const auto chosen = [&](int64_t tokens, Positions sinks) {
    return most_attended(
        {.mass = mass, .valid = &valid, .sinks = sinks, .group_tokens = 2, .tokens = tokens});
  };
  EXPECT_EQ(chosen(1, {}), (Positions{4}));
  EXPECT_EQ(chosen(3, {}), (Positions{0, 2, 4})) << "the lower of equals";
  EXPECT_EQ(chosen(3, {0, 2}), (Positions{2, 3, 7})) << "a sink's group stays anyway";
  EXPECT_EQ(chosen(8, {}), (Positions{0, 1, 2, 3, 4, 5, 7})) << "nothing was paid to 6";
}

TEST(MostAttended, NeverKeepsPadding) {
  PaddingMask valid;
  const bool flags[] = {false, false, true, true, false, true};
  valid.append(6, flags);
  const std::vector<float> mass = {9, 9, 1, 2, 9, 3};
  EXPECT_EQ(most_attended({.mass = mass, .valid = &valid, .group_tokens = 4, .tokens = 3}),
            (Positions{2, 3, 5}));
  EXPECT_EQ(most_attended({.mass = mass, .valid = &valid, .group_tokens = 4, .tokens = 2}),
            (Positions{3, 5}));
}

TEST(MostAttended, SetsNestAsMoreAreRetained) {
  const PaddingMask valid = all_valid(200);
  std::mt19937_64 random(2);
  std::vector<float> mass(200);
  for (float& value : mass) value = static_cast<float>(random() % 9);
  Positions before;
  for (int64_t tokens = 1; tokens <= 200; ++tokens) {
    Positions now =
        most_attended({.mass = mass, .valid = &valid, .group_tokens = 4, .tokens = tokens});
    EXPECT_TRUE(std::is_sorted(now.begin(), now.end()));
    EXPECT_TRUE(std::includes(now.begin(), now.end(), before.begin(), before.end())) << tokens;
    before = std::move(now);
  }
}

TEST(WhoStays, AreThoseWorthMostWithTheirNeighbours) {
  const Positions positions = {2, 3, 7, 8, 9, 20};
  const std::vector<float> importance = {4, 1, 2, 3, 2, 6};
  const auto stay = [&](int64_t tokens, int64_t pool) {
    return retained_after_eviction(
        {.positions = positions, .importance = importance, .pool = pool, .tokens = tokens});
  };
  EXPECT_EQ(stay(0, 1), Positions{});
  EXPECT_EQ(stay(2, 1), (Positions{20, 2})) << "the best first";
  EXPECT_EQ(stay(4, 1), (Positions{20, 2, 8, 7})) << "the lower of equals";
  EXPECT_EQ(stay(1, 3), (Positions{8})) << "2 + 3 + 2";
  EXPECT_EQ(stay(3, 3), (Positions{8, 20, 2})) << "5, 5, 5, 7, 5, 6";
  EXPECT_EQ(stay(9, 5).size(), positions.size()) << "all there are";
}

TEST(WhoStays, CountsOnlyWhatIsRetainedBeside) {
  std::mt19937_64 random(3);
  for (int64_t pool = 1; pool <= 9; ++pool) {
    Positions positions;
    std::vector<float> importance, dense(120, 0.0f);
    for (int32_t position = 0; position < 120; ++position) {
      if (random() % 3 == 0) continue;
      positions.push_back(position);
      importance.push_back(static_cast<float>(random() % 16));
      dense[position] = importance.back();
    }
    pool_neighbours(dense, pool);
    Positions stay = retained_after_eviction(
        {.positions = positions, .importance = importance, .pool = pool, .tokens = 30});
    ASSERT_EQ(stay.size(), 30u);
    std::sort(stay.begin(), stay.end());
    for (const int32_t position : positions) {
      if (std::binary_search(stay.begin(), stay.end(), position)) continue;
      for (const int32_t other : stay) {
        ASSERT_GE(dense[other], dense[position]) << pool;
        if (dense[other] == dense[position]) {
          ASSERT_LT(other, position);
        }
      }
    }
  }
}

TEST(WorthOf, IsTheMeanAndWhatItVaries) {
  EXPECT_EQ(importance_of(0.5f, 0.25f, 100), 0.5f);
  EXPECT_EQ(importance_of(0.5f, 0.5f, 2), 1.0f);
  EXPECT_EQ(importance_of(0.5f, 0.2f, 100), 0.5f) << "rounding makes no variance below 0";
}

TEST(AttentionShape, IsThatOfThePaperInAnyUnit) {
  AttentionShape one, other, even;
  const std::vector<double> papers = {7.774380648611771, 5.407015096778621, 5.527702582901318};
  EXPECT_EQ(one.quality(papers), 0);
  for (const double received : {1.0, 2.0, 0.0, 5.0}) {
    one.add(received);
    other.add(received * 0x1p-20);
    even.add(3);
  }
  // p = 1/8, 1/4, 0, 5/8: H = .9003, V = .054688, Kurt = 2.
  const double expected = std::pow(0.9002561, 1 / 7.774380648611771) *
                          std::pow(0.0546875, 1 / 5.407015096778621) *
                          std::pow(2.0, 1 / 5.527702582901318);
  EXPECT_NEAR(one.quality(papers), expected, 1e-6);
  EXPECT_NEAR(other.quality(papers), expected, 1e-6);
  EXPECT_EQ(even.quality(papers), 0);
  EXPECT_NEAR(one.quality(std::vector{1.0, 0.5, 2.0}),
              0.9002561 * 0.0546875 * 0.0546875 * std::sqrt(2.0), 1e-8);
}

TEST(RetainedTokens, OfBothPrecisionsAreRetainedAndCut) {
  RetainedTokens retained;
  retained.set_float8({4, 6, 9}, {1, 2, 1, 2});
  retained.set({5, 7, 12}, 4);
  EXPECT_EQ(retained.count(), 6);
  EXPECT_EQ(retained.mask(0, 16), 0b0001001011110000u);
  EXPECT_EQ(retained.whole_groups(), (Positions{1}));
  retained.next = Positions{9, 4, 12};
  retained.truncate({.positions = 9, .sealed = 8, .group_tokens = 4, .step = 16});
  EXPECT_EQ(retained.float8(), (Positions{4, 6}));
  EXPECT_EQ(retained.positions(), (Positions{5, 7}));
  EXPECT_EQ(retained.mask(0, 16), 0b11110000u);
  EXPECT_EQ(retained.next, Positions{4});
}

TEST(RetainedTokens, KnowTheirPositionsAndWholeGroups) {
  RetainedTokens retained;
  EXPECT_EQ(retained.mask(0, 64), 0u);
  retained.set({3, 4, 5, 6, 7, 8, 62, 63, 64, 65, 130}, 4);
  EXPECT_EQ(retained.mask(0, 8), 0xf8u);
  EXPECT_EQ(retained.mask(60, 8), 0b00111100u);
  EXPECT_EQ(retained.mask(128, 64), 4u);
  EXPECT_EQ(retained.mask(1000, 3), 0u);
  EXPECT_EQ(retained.whole_groups(), (Positions{1}));
  retained.set({0, 2, 4, 5}, 1);
  EXPECT_EQ(retained.whole_groups(), (Positions{0, 2, 4, 5}));
}

TEST(RetainedTokens, ForgetWhatIsCut) {
  RetainedTokens retained;
  retained.set({1, 4, 5, 6, 7, 70}, 4);
  retained.mass.assign(80, 1.0f);
  retained.next = Positions{1, 70};
  retained.seen_positions = 80;
  retained.truncate({.positions = 6, .sealed = 6, .group_tokens = 4, .step = 16});
  EXPECT_EQ(retained.positions(), (Positions{1, 4, 5}));
  EXPECT_EQ(retained.mask(0, 64), 0x32u);
  EXPECT_TRUE(retained.whole_groups().empty());
  EXPECT_EQ(retained.mass.size(), 6u);
  EXPECT_EQ(retained.seen_positions, 6);
  EXPECT_EQ(retained.next, Positions{1});
}

TEST(RetainedTokens, RememberWhatAStepPaidThatIsTakenBack) {
  RetainedTokens retained;
  retained.mass.assign(80, 1.0f);
  retained.seen_positions = 80;
  retained.truncate({.positions = 77, .sealed = 64, .group_tokens = 4, .step = 3});
  EXPECT_EQ(retained.seen_positions, 80);
  EXPECT_EQ(retained.mass.size(), 80u);
  retained.truncate({.positions = 76, .sealed = 64, .group_tokens = 4, .step = 3});
  EXPECT_EQ(retained.seen_positions, 76);
  EXPECT_EQ(retained.mass.size(), 76u);
}

}  // namespace
}  // namespace kvswap
