#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/group_mass.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  int64_t heads = 3;
  int64_t tokens = 100;
  int64_t group_tokens = 4;
  float spread = 3;
  HeadJoin join = HeadJoin::kSum;
};

struct Scored {
  explicit Scored(const Case& of)
      : shape(of),
        logits(random_elements<float>(of.heads * of.tokens, 1)),
        scores((of.tokens + of.group_tokens - 1) / of.group_tokens) {
    for (float& logit : logits) logit *= of.spread;
  }

  const std::vector<float>& mass() {
    group_mass({.logits = logits.data(),
                .group_scores = scores.data(),
                .tokens = shape.tokens,
                .group_tokens = shape.group_tokens,
                .heads = shape.heads,
                .join = shape.join});
    return scores;
  }

  /// In double. -1: no token counts.
  std::vector<double> expected() const {
    std::vector<double> joined(scores.size(), -1);
    for (int64_t h = 0; h < shape.heads; ++h) {
      double total = 0;
      for (int64_t t = 0; t < shape.tokens; ++t) total += weight(h, t);
      for (size_t g = 0; g < scores.size(); ++g) {
        double mass = 0;
        const int64_t first = static_cast<int64_t>(g) * shape.group_tokens;
        for (int64_t t = first; t < std::min(first + shape.group_tokens, shape.tokens); ++t) {
          if (weight(h, t) > 0) joined[g] = std::max(joined[g], 0.0);
          if (total > 0) mass += weight(h, t) / total;
        }
        if (joined[g] < 0) continue;
        joined[g] = shape.join == HeadJoin::kSum ? joined[g] + mass : std::max(joined[g], mass);
      }
    }
    return joined;
  }
  double weight(int64_t head, int64_t token) const {
    const float logit = logits[head * shape.tokens + token];
    return logit > kNever ? std::exp(static_cast<double>(logit)) : 0;
  }

  Case shape;
  std::vector<float> logits, scores;
};

class GroupMass : public KernelTest {};

void expect_matches_reference(Scored run) {
  const std::vector<double> expected = run.expected();
  const std::vector<float>& scores = run.mass();
  for (size_t g = 0; g < scores.size(); ++g) {
    if (expected[g] < 0) {
      EXPECT_EQ(scores[g], kNever) << g;
    } else {
      EXPECT_GT(scores[g], 0) << g;
      EXPECT_NEAR(scores[g], expected[g], 1e-6 + 1e-5 * expected[g]) << g;
    }
  }
}

TEST_P(GroupMass, MatchesReference) {
  for (const HeadJoin join : {HeadJoin::kSum, HeadJoin::kMax}) {
    for (const int64_t group_tokens : {1, 2, 3, 4, 8, 16, 31, 32, 64}) {
      for (const int64_t tokens : {0, 1, 63, 64, 1000}) {
        expect_matches_reference(
            Scored({.tokens = tokens, .group_tokens = group_tokens, .join = join}));
      }
    }
    expect_matches_reference(Scored({.heads = 33, .tokens = 300, .spread = 20, .join = join}));
    expect_matches_reference(Scored({.heads = 1, .join = join}));
    expect_matches_reference(Scored({.heads = 0, .join = join}));
  }
}

TEST_P(GroupMass, WhatDoesNotCountIsNeverChosen) {
  Scored run({.tokens = 40, .group_tokens = 4});
  for (int64_t t = 4; t < 8; ++t) {
    for (int64_t h = 0; h < 3; ++h) run.logits[h * 40 + t] = kNever;
  }
  for (int64_t t = 0; t < 40; ++t) run.logits[40 + t] = kNever;  // a head that knows nothing
  run.logits[13] = kNever;
  expect_matches_reference(run);
  run.mass();
  EXPECT_EQ(run.scores[1], kNever);
  EXPECT_GT(run.scores[2], 0);
}

TEST_P(GroupMass, AGroupWithWhatIsNoNumberIsWorthMoreThanAny) {
  for (const HeadJoin join : {HeadJoin::kSum, HeadJoin::kMax}) {
    for (const int64_t group_tokens : {1, 3, 4, 16}) {
      Scored run({.tokens = 100, .group_tokens = group_tokens, .join = join});
      std::vector<bool> has_none(run.scores.size());
      for (const int64_t token : {int64_t{5}, int64_t{6}, int64_t{99}}) {
        for (int64_t h = 0; h < 3; ++h) run.logits[h * 100 + token] = kNan;
        has_none[token / group_tokens] = true;
      }
      const std::vector<double> expected = run.expected();
      const std::vector<float>& scores = run.mass();
      for (size_t g = 0; g < scores.size(); ++g) {
        if (has_none[g]) {
          EXPECT_EQ(scores[g], kInfinity) << g;
        } else {
          EXPECT_NEAR(scores[g], expected[g], 1e-6 + 1e-5 * expected[g]) << g;
        }
      }
      std::fill(run.logits.begin(), run.logits.end(), kNan);
      for (const float score : run.mass()) EXPECT_EQ(score, kInfinity) << "nobody has a number";
    }
  }
}

TEST_P(GroupMass, TokensFarBelowTheLargestStillCount) {
  Scored run({.heads = 2, .tokens = 64, .group_tokens = 4});
  std::fill(run.logits.begin(), run.logits.end(), -3e38f);
  run.logits[20] = 3e38f;
  run.logits[64 + 30] = kInfinity;
  run.mass();
  for (size_t g = 0; g < run.scores.size(); ++g) {
    EXPECT_NEAR(run.scores[g], g == 5 || g == 7 ? 1 : 0, 1e-6);
    EXPECT_GT(run.scores[g], 0);
  }
}

TEST_P(GroupMass, PiecesAreTheWhole) {
  Scored run({.heads = 2, .tokens = 48, .group_tokens = 4, .spread = 30});
  const std::vector<float> whole = run.mass();
  std::vector<float> weights(2 * 12), largest(6), sums(6), shares(6), scores(12);
  const std::vector<float> factors(2, std::numbers::log2e_v<float>);
  for (int64_t piece = 0; piece < 3; ++piece) {
    weigh_groups({.products = run.logits.data() + piece * 16,
                  .factors = factors.data(),
                  .weights = weights.data() + piece * 8,
                  .largest = largest.data() + piece * 2,
                  .sums = sums.data() + piece * 2,
                  .product_stride = 48,
                  .weight_stride = 4,
                  .tokens = 16,
                  .group_tokens = 4,
                  .heads = 2});
  }
  mass_shares({.largest = largest.data(),
               .sums = sums.data(),
               .shares = shares.data(),
               .pieces = 3,
               .heads = 2});
  for (int64_t piece = 0; piece < 3; ++piece) {
    join_heads({.weights = weights.data() + piece * 8,
                .shares = shares.data() + piece * 2,
                .group_scores = scores.data() + piece * 4,
                .weight_stride = 4,
                .groups = 4,
                .heads = 2});
  }
  for (size_t g = 0; g < 12; ++g) EXPECT_NEAR(scores[g], whole[g], 1e-6 + 1e-5 * whole[g]);
}

KVSWAP_EVERY_LEVEL(GroupMass);

}  // namespace
}  // namespace kvswap
