#include <cmath>

#include "kernels/int8_score.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

class Int8Score : public KernelTest {};

/// Whole numbers: every level gives the same bits.
void expect_exact(int64_t blocks, int64_t rank, int64_t queries) {
  const auto summary = random_elements<int8_t>(blocks * rank * kSummaryBlock, 1);
  const auto token_scale = random_elements<float>(blocks * kSummaryBlock, 3);
  const int64_t stride = int8_stride(rank);
  auto query = random_elements<int8_t>(queries * stride, 2);
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t r = rank; r < stride; ++r) query[q * stride + r] = 0;
  }
  const int64_t score_stride = blocks * kSummaryBlock + 5;
  std::vector<float> scores(queries * score_stride, -7.0f);
  int8_score({.summary = summary.data(),
              .token_scale = token_scale.data(),
              .query = query.data(),
              .scores = scores.data(),
              .score_stride = score_stride,
              .blocks = blocks,
              .rank = rank,
              .queries = queries});
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t token = 0; token < blocks * kSummaryBlock; ++token) {
      const int64_t first = token / kSummaryBlock * rank * kSummaryBlock + token % kSummaryBlock;
      int32_t sum = 0;
      for (int64_t r = 0; r < rank; ++r) {
        sum += query[q * stride + r] * summary[first + r * kSummaryBlock];
      }
      const float expected = static_cast<float>(sum) * token_scale[token];
      ASSERT_EQ(scores[q * score_stride + token], expected) << q << ", " << token;
    }
    ASSERT_EQ(scores[q * score_stride + blocks * kSummaryBlock], -7.0f) << "written past the end";
  }
}

TEST_P(Int8Score, SumsAreExact) {
  for (const int64_t rank : {1, 3, 4, 6, 31, 32, 33, 64, 1024}) {
    for (const int64_t queries : {1, 2, 5, 9, 16, 23}) expect_exact(2, rank, queries);
  }
  expect_exact(0, 8, 1);
}

TEST_P(Int8Score, TheLargestNumbersDoNotOverflow) {
  const int64_t rank = 1024;
  const std::vector<int8_t> summary(rank * kSummaryBlock, -127), query(rank, -127);
  const std::vector<float> token_scale(kSummaryBlock, 1.0f);
  std::vector<float> scores(kSummaryBlock);
  int8_score({.summary = summary.data(),
              .token_scale = token_scale.data(),
              .query = query.data(),
              .scores = scores.data(),
              .score_stride = kSummaryBlock,
              .blocks = 1,
              .rank = rank,
              .queries = 1});
  for (const float score : scores) EXPECT_EQ(score, 127.0f * 127.0f * rank);
}

KVSWAP_EVERY_LEVEL(Int8Score);

TEST(QuantizeQueries, AreWithinHalfALevel) {
  const int64_t rank = 7, queries = 6;
  auto query = random_elements<float>(queries * rank, 4);
  for (int64_t r = 0; r < rank; ++r) query[r] = 0;
  for (int64_t r = 0; r < rank; ++r) query[5 * rank + r] *= 1e-39f;
  query[2 * rank + 3] = NAN;
  query[3 * rank + 1] = INFINITY;
  std::vector<int8_t> quantized(queries * int8_stride(rank), 99);
  std::vector<float> scales(queries);
  quantize_queries({.query = query.data(),
                    .quantized = quantized.data(),
                    .scales = scales.data(),
                    .rank = rank,
                    .queries = queries});
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t r = 0; r < int8_stride(rank); ++r) {
      const float level = quantized[q * int8_stride(rank) + r];
      if (r >= rank || q == 0 || q == 2 || q == 3) {
        EXPECT_EQ(level, 0);
      } else {
        EXPECT_NEAR(level * scales[q], query[q * rank + r], 0.501f * scales[q]);
      }
    }
  }
  EXPECT_EQ(scales[0], 0);
  EXPECT_TRUE(std::isnan(scales[2]) && std::isnan(scales[3])) << "a head that knows nothing";
}

}  // namespace
}  // namespace kvswap
