#include "kernels/kernel_test.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

class LowRankScore : public KernelTest {};

template <typename T>
void expect_matches_reference(int64_t blocks, int64_t rank, int64_t queries) {
  const auto summary = random_elements<T>(blocks * rank * kSummaryBlock, 1);
  const auto query = random_elements<float>(queries * rank, 2);
  const auto token_scale = random_elements<float>(blocks * kSummaryBlock, 3);
  const bool scaled = std::is_same_v<T, int8_t>;
  const int64_t stride = blocks * kSummaryBlock + 5;
  std::vector<float> scores(queries * stride, -7.0f);
  low_rank_score({.summary = summary.data(),
                  .token_scale = scaled ? token_scale.data() : nullptr,
                  .query = query.data(),
                  .scores = scores.data(),
                  .score_stride = stride,
                  .blocks = blocks,
                  .rank = rank,
                  .queries = queries,
                  .dtype = dtype_of<T>()});
  for (int64_t q = 0; q < queries; ++q) {
    for (int64_t token = 0; token < blocks * kSummaryBlock; ++token) {
      const int64_t block = token / kSummaryBlock;
      double expected = 0;
      double size = 1;
      for (int64_t r = 0; r < rank; ++r) {
        const double key =
            to_float(summary[(block * rank + r) * kSummaryBlock + token % kSummaryBlock]);
        expected += query[q * rank + r] * key;
        size += std::abs(query[q * rank + r] * key);
      }
      if (scaled) expected *= token_scale[token];
      if (scaled) size = size * std::abs(token_scale[token]) + 1;
      EXPECT_NEAR(scores[q * stride + token], expected, 1e-6 * size) << "query " << q;
    }
    EXPECT_EQ(scores[q * stride + blocks * kSummaryBlock], -7.0f) << "written past the end";
  }
}

TEST_P(LowRankScore, MatchesReference) {
  for (const int64_t rank : {1, 3, 8, 31, 32, 48, 64}) {
    for (const int64_t queries : {1, 2, 3, 4, 5, 8, 21}) {
      expect_matches_reference<float>(3, rank, queries);
      expect_matches_reference<BFloat16>(3, rank, queries);
      expect_matches_reference<Float16>(3, rank, queries);
      expect_matches_reference<int8_t>(3, rank, queries);
    }
  }
}

TEST_P(LowRankScore, NothingToScore) { expect_matches_reference<float>(0, 8, 1); }

KVSWAP_EVERY_LEVEL(LowRankScore);

}  // namespace
}  // namespace kvswap
