// One pass over int8 rows against int8_score() and weigh_groups(), which keep every product.
#include <cmath>
#include <limits>

#include "kernels/group_mass.h"
#include "kernels/int8_mass.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Case {
  int64_t tokens = 200;
  int64_t rank = 32;
  int64_t heads = 9;
  int64_t group_tokens = 4;
  int64_t gaps = 0;         // the first tokens, and every 37th: no candidates
  float factor = 0.00005f;  // exponents up to 20
};

struct Weighed {
  explicit Weighed(const Case& of)
      : groups((of.tokens + of.group_tokens - 1) / of.group_tokens),
        stride((of.tokens + kMassUnit - 1) / kMassUnit * kMassUnit),
        weights(of.heads * stride),
        largest(of.heads),
        sums(of.heads) {}

  /// Each head's share of a group.
  float share(int64_t head, int64_t group) const {
    return sums[head] > 0 ? weights[head * stride + group] / sums[head] : 0;
  }

  int64_t groups, stride;
  std::vector<float> weights, largest, sums;
};

class SummaryEncoder {
 public:
  explicit SummaryEncoder(const Case& of)
      : case_(of),
        blocks_((of.tokens + kSummaryBlock - 1) / kSummaryBlock),
        summary_(random_elements<int8_t>(blocks_ * of.rank * kSummaryBlock, 1)),
        query_(random_elements<int8_t>(of.heads * int8_stride(of.rank), 2)),
        scale(random_elements<float>(blocks_ * kSummaryBlock, 3)),
        factors(of.heads, of.factor),
        counted_((of.tokens + 63) / 64, ~uint64_t{0}) {
    for (int64_t head = 0; head < of.heads; ++head) {
      for (int64_t r = of.rank; r < int8_stride(of.rank); ++r) {
        query_[head * int8_stride(of.rank) + r] = 0;
      }
    }
    for (int64_t t = 0; t < of.tokens; ++t) {
      if (is_gap(t)) counted_[t / 64] &= ~(uint64_t{1} << (t % 64));
    }
  }
  bool is_gap(int64_t token) const {
    return case_.gaps > 0 && (token < case_.gaps || token % 37 == 0);
  }

  bool in_one_pass(Weighed& own) const {
    return int8_mass({.summary = summary_.data(),
                      .token_scale = scale.data(),
                      .query = query_.data(),
                      .factors = factors.data(),
                      .counted = counted_.data(),
                      .weights = own.weights.data(),
                      .largest = own.largest.data(),
                      .sums = own.sums.data(),
                      .weight_stride = own.stride,
                      .tokens = case_.tokens,
                      .group_tokens = case_.group_tokens,
                      .rank = case_.rank,
                      .heads = case_.heads});
  }

  void by_products(Weighed& own) const {
    const int64_t stride = blocks_ * kSummaryBlock;
    std::vector<float> products(case_.heads * stride);
    int8_score({.summary = summary_.data(),
                .token_scale = scale.data(),
                .query = query_.data(),
                .scores = products.data(),
                .score_stride = stride,
                .blocks = blocks_,
                .rank = case_.rank,
                .queries = case_.heads});
    for (int64_t head = 0; head < case_.heads; ++head) {
      for (int64_t t = 0; t < case_.tokens; ++t) {
        if (is_gap(t)) products[head * stride + t] = kNever;
      }
    }
    weigh_groups({.products = products.data(),
                  .factors = factors.data(),
                  .weights = own.weights.data(),
                  .largest = own.largest.data(),
                  .sums = own.sums.data(),
                  .product_stride = stride,
                  .weight_stride = own.stride,
                  .tokens = case_.tokens,
                  .group_tokens = case_.group_tokens,
                  .heads = case_.heads});
  }

 private:
  Case case_;
  int64_t blocks_;
  std::vector<int8_t> summary_, query_;

 public:
  std::vector<float> scale, factors;

 private:
  std::vector<uint64_t> counted_;
};

class Int8Mass : public KernelTest {
 protected:
  /// Nothing to test where it is not for this CPU.
  static bool is_here() {
    Weighed weighed{{}};
    return SummaryEncoder({}).in_one_pass(weighed);
  }
};

void expect_the_same(const Case& of) {
  Weighed own(of), expected(of);
  const SummaryEncoder rows(of);
  rows.by_products(expected);
  ASSERT_TRUE(rows.in_one_pass(own));
  for (int64_t head = 0; head < of.heads; ++head) {
    for (int64_t group = 0; group < own.groups; ++group) {
      const float share = expected.share(head, group);
      ASSERT_NEAR(own.share(head, group), share, 1e-9 + 1e-5 * share) << head << ", " << group;
      ASSERT_EQ(own.weights[head * own.stride + group] > 0,
                expected.weights[head * own.stride + group] > 0);
    }
    if (expected.largest[head] == kNever) {
      EXPECT_EQ(own.largest[head], kNever);
      continue;
    }
    const double off = std::exp2(double{own.largest[head]} - expected.largest[head]);
    EXPECT_NEAR(off * own.sums[head] / expected.sums[head], 1, 1e-5);
  }
}

TEST_P(Int8Mass, AsByProducts) {
  if (!is_here()) return;
  for (const int64_t group_tokens : {1, 2, 4, 8, 16, 32, 64}) {
    for (const int64_t tokens : {1, 15, 64, 65, 500}) {
      for (const int64_t gaps : {0, 1, 64, 100, 500}) {
        expect_the_same({.tokens = tokens, .group_tokens = group_tokens, .gaps = gaps});
      }
    }
  }
  for (const int64_t rank : {1, 3, 4, 30, 33, 192}) expect_the_same({.rank = rank, .gaps = 3});
  for (const int64_t heads : {0, 1, 3, 4, 32, 65}) expect_the_same({.heads = heads});
  expect_the_same({.tokens = 0});
  expect_the_same({.factor = 0});
}

TEST_P(Int8Mass, WhatItIsNotForIsLeftToTheOthers) {
  Weighed own{{}};
  SummaryEncoder rows{{}};
  rows.scale[77] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(rows.in_one_pass(own));
  rows = SummaryEncoder{{}};
  rows.factors[8] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(rows.in_one_pass(own));
  EXPECT_FALSE(SummaryEncoder({.factor = 1e30f}).in_one_pass(own));
  EXPECT_FALSE(SummaryEncoder({.factor = 0.01f}).in_one_pass(own)) << "weights beyond 2^60";
  EXPECT_FALSE(SummaryEncoder({.group_tokens = 3}).in_one_pass(own));
  EXPECT_EQ(is_here() && GetParam() != "AVX3", false);
}

KVSWAP_EVERY_LEVEL(Int8Mass);

}  // namespace
}  // namespace kvswap
