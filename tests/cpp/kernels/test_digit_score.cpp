#include <cmath>

#include "kernels/digit_score.h"
#include "kernels/int4_rows.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

class DigitScore : public KernelTest {};

struct Case {
  DType dtype;
  int64_t blocks, rank, queries;
};

struct SummaryEncoder {
  std::vector<std::byte> bytes = {};
  std::vector<int8_t> levels = {};  // [blocks, rank, 16]
  std::vector<float> token_scale = {};
};

SummaryEncoder rows_of(const Case& of) {
  SummaryEncoder rows = {.token_scale = random_elements<float>(of.blocks * kSummaryBlock, 3)};
  const int64_t bytes = of.blocks * row_bytes(of.dtype, of.rank) * kSummaryBlock;
  for (const int8_t byte : random_elements<int8_t>(bytes, 1)) {
    rows.bytes.push_back(static_cast<std::byte>(byte));
  }
  const int8_t* levels = as_int8_rows(of.dtype, rows.bytes.data(), of.blocks, of.rank);
  rows.levels.assign(levels, levels + of.blocks * of.rank * kSummaryBlock);
  return rows;
}

LowRankScoreArgs args_of(const Case& of, const SummaryEncoder& rows,
                         const std::vector<float>& query, std::vector<float>& scores) {
  const int64_t stride = of.blocks * kSummaryBlock + 5;
  scores.assign(of.queries * stride, -7.0f);
  return {.summary = rows.bytes.data(),
          .token_scale = rows.token_scale.data(),
          .query = query.data(),
          .scores = scores.data(),
          .score_stride = stride,
          .blocks = of.blocks,
          .rank = of.rank,
          .queries = of.queries,
          .dtype = of.dtype};
}

void expect_products(const Case& of, const SummaryEncoder& rows, const std::vector<float>& query,
                     const std::vector<float>& scores) {
  const int64_t stride = of.blocks * kSummaryBlock + 5;
  for (int64_t q = 0; q < of.queries; ++q) {
    for (int64_t token = 0; token < of.blocks * kSummaryBlock; ++token) {
      const int64_t first = token / kSummaryBlock * of.rank * kSummaryBlock + token % kSummaryBlock;
      double expected = 0, size = 1;
      for (int64_t r = 0; r < of.rank; ++r) {
        const double product =
            double{query[q * of.rank + r]} * rows.levels[first + r * kSummaryBlock];
        expected += product;
        size += std::abs(product);
      }
      const double scale = rows.token_scale[token];
      ASSERT_NEAR(scores[q * stride + token], expected * scale, 1e-6 * size * std::abs(scale))
          << q << ", " << token;
    }
    ASSERT_EQ(scores[q * stride + of.blocks * kSummaryBlock], -7.0f) << "written past the end";
  }
}

void expect_as_near_as_floats(const Case& of) {
  const SummaryEncoder rows = rows_of(of);
  const auto query = random_elements<float>(of.queries * of.rank, 2);
  std::vector<float> scores;
  LowRankScoreArgs args = args_of(of, rows, query, scores);
  low_rank_score(args);
  expect_products(of, rows, query, scores);
  for (const bool has_next : {false, true}) {
    args = args_of(of, rows, query, scores);
    if (has_next) {
      args.next_summary = rows.bytes.data();
      args.next_scale = rows.token_scale.data();
    }
    if (digit_score(args)) expect_products(of, rows, query, scores);
  }
}

TEST_P(DigitScore, ScoresAreAsNearAsFloats) {
  for (const DType dtype : {DType::kInt8, DType::kInt4}) {
    for (const int64_t rank : {1, 3, 4, 7, 8, 31, 32, 33, 48, 64, 1024}) {
      for (const int64_t queries : {1, 2, 4, 5, 9}) {
        expect_as_near_as_floats({dtype, 3, rank, queries});
      }
    }
    expect_as_near_as_floats({dtype, 70, 32, 1});
    expect_as_near_as_floats({dtype, 0, 8, 1});
  }
}

/// The same bits alone and among others, and in pieces.
TEST_P(DigitScore, ScoresDependOnTheirQueryAlone) {
  const Case of = {DType::kInt4, 5, 33, 6};
  const SummaryEncoder rows = rows_of(of);
  const auto query = random_elements<float>(of.queries * of.rank, 2);
  std::vector<float> together, alone;
  if (!digit_score(args_of(of, rows, query, together))) return;  // no such products here
  const int64_t stride = of.blocks * kSummaryBlock + 5;
  for (int64_t q = 0; q < of.queries; ++q) {
    const Case single = {of.dtype, of.blocks, of.rank, 1};
    const std::vector<float> own(query.begin() + q * of.rank, query.begin() + (q + 1) * of.rank);
    ASSERT_TRUE(digit_score(args_of(single, rows, own, alone)));
    const auto first = together.begin() + q * stride;
    EXPECT_TRUE(std::equal(first, first + of.blocks * kSummaryBlock, alone.begin()));
  }
}

TEST_P(DigitScore, QueriesThatAreNoDigitsAreLeft) {
  const Case of = {DType::kInt8, 2, 8, 3};
  const SummaryEncoder rows = rows_of(of);
  for (const float other : {NAN, INFINITY, -INFINITY}) {
    auto query = random_elements<float>(of.queries * of.rank, 2);
    query[of.rank + 5] = other;
    std::vector<float> scores;
    EXPECT_FALSE(digit_score(args_of(of, rows, query, scores)));
    EXPECT_EQ(scores.front(), -7.0f);
  }
  std::vector<float> scores;
  const std::vector<float> tiny(of.queries * of.rank, 1e-30f), zeros(of.queries * of.rank, 0.0f);
  EXPECT_FALSE(digit_score(args_of(of, rows, tiny, scores)));
  EXPECT_FALSE(digit_score(args_of(of, rows, zeros, scores)));
}

TEST_P(DigitScore, TheLargestNumbersDoNotOverflow) {
  const Case of = {DType::kInt8, 1, 1024, 1};
  const SummaryEncoder rows = {std::vector<std::byte>(of.rank * kSummaryBlock, std::byte{0x80}),
                               std::vector<int8_t>(of.rank * kSummaryBlock, -128),
                               std::vector<float>(kSummaryBlock, 1.0f)};
  for (const float each : {-127.0f, 127.0f, 3e30f}) {
    const std::vector<float> query(of.rank, each);
    std::vector<float> scores;
    if (digit_score(args_of(of, rows, query, scores))) expect_products(of, rows, query, scores);
  }
}

TEST_P(DigitScore, AScaleThatIsNoNumberShows) {
  const Case of = {DType::kInt4, 1, 16, 1};
  SummaryEncoder rows = rows_of(of);
  rows.token_scale[3] = NAN;
  const auto query = random_elements<float>(of.rank, 2);
  std::vector<float> scores;
  if (!digit_score(args_of(of, rows, query, scores))) return;
  EXPECT_TRUE(std::isnan(scores[3]));
  EXPECT_FALSE(std::isnan(scores[2]));
}

KVSWAP_EVERY_LEVEL(DigitScore);

}  // namespace
}  // namespace kvswap
