#include <limits>
#include <random>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/top_k_levels.cuh"
#include "kernels/group_topk.h"
#include "kernels_cuda/device_test.h"
#include "kernels_cuda/summary_case.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(CudaTopK, OrderOfScoresIsTheOrderOfNumbers) {
  const std::vector<float> rising = {
      -3e38f, -2.0f, -1e-40f, 0.0f, 1e-45f, 1.0f, 3e38f, std::numeric_limits<float>::infinity()};
  const auto key = [](float score) { return cuda::ordered_score(std::bit_cast<uint32_t>(score)); };
  for (size_t i = 1; i < rising.size(); ++i) EXPECT_LT(key(rising[i - 1]), key(rising[i]));
  EXPECT_EQ(key(-0.0f), key(0.0f));
  EXPECT_EQ(key(kNever), 0u);
  EXPECT_EQ(key(kNan), 0u);
  EXPECT_EQ(key(-kNan), 0u);
  EXPECT_GT(key(-3.4e38f), 0u);
}

/// Rows of scores with ties, -inf and NaN, `stride` apart.
std::vector<float> scores_with_ties(int64_t rows, int64_t stride, float spread) {
  std::vector<float> scores = random_elements<float>(rows * stride, 5);
  for (size_t i = 0; i < scores.size(); ++i) {
    scores[i] = std::round(scores[i] * spread) / 4;
    if (i % 11 == 3) scores[i] = kNever;
    if (i % 101 == 7) scores[i] = kNan;
  }
  return scores;
}

struct TopKShape {
  int64_t rows, count, k;
  float spread = 30.0f;
  bool differs = false;  // rows in how many they want
  bool aligned = false;  // rows to 16 bytes
};

void expect_top_k_as_on_cpu(const TopKShape& s) {
  const int64_t stride = s.aligned ? (s.count + 7) / 4 * 4 : s.count + 3;
  GuardedBuffer<float> scores(scores_with_ties(s.rows, stride, s.spread));
  GuardedBuffer<int32_t> counts(s.rows), wanted(s.rows);
  std::vector<int32_t> expected(s.rows * s.k, -1), expected_counts(s.rows);
  for (int64_t row = 0; row < s.rows; ++row) {
    wanted[row] = static_cast<int32_t>(s.differs ? s.k * (row + 1) / 3 : s.k + row);
    counts[row] = static_cast<int32_t>(row % 3 == 1 ? s.count / 2 : s.count);
    expected_counts[row] = static_cast<int32_t>(top_k({.scores = scores.data() + row * stride,
                                                       .indices = expected.data() + row * s.k,
                                                       .count = counts[row],
                                                       .k = std::min<int64_t>(wanted[row], s.k)}));
  }
  in_every_order([&] {
    GuardedBuffer<int32_t> indices(s.rows * s.k), chosen(s.rows);
    GuardedBuffer<char> scratch(cuda::top_k_scratch_bytes(s.rows, s.count, s.k));
    expect_ok(cuda::top_k({.scores = scores.data(),
                           .counts = counts.data(),
                           .wanted = wanted.data(),
                           // As torch's tensors without elements have it.
                           .indices = s.k == 0 ? nullptr : indices.data(),
                           .chosen = chosen.data(),
                           .rows = s.rows,
                           .row_stride = stride,
                           .count = s.count,
                           .k = s.k,
                           .scratch = scratch.data()},
                          nullptr));
    EXPECT_EQ(chosen.copy(), expected_counts) << s.count << " " << s.k;
    EXPECT_EQ(indices.copy(), expected) << s.count << " " << s.k;
  });
}

TEST(CudaTopK, AsOnCpu) {
  for (const int64_t count : {0, 1, 17, 4096, 4097}) {
    for (const int64_t k : {0, 13, 400, 5000}) {
      expect_top_k_as_on_cpu({.rows = 2, .count = count, .k = k});
    }
  }
  expect_top_k_as_on_cpu({.rows = 0, .count = 100, .k = 5});
}

TEST(CudaTopK, TiesOnly) {
  for (const float spread : {0.0f, 0.3f, 1e6f}) {
    expect_top_k_as_on_cpu({.rows = 2, .count = 3000, .k = 700, .spread = spread});
  }
}

TEST(CudaTopK, SeveralLevels) {
  expect_top_k_as_on_cpu({.rows = 1, .count = 16385, .k = 4096});
  expect_top_k_as_on_cpu({.rows = 2, .count = 20000, .k = 300});
  expect_top_k_as_on_cpu({.rows = 1, .count = 70000, .k = 4096, .spread = 4000.0f});
  expect_top_k_as_on_cpu({.rows = 1, .count = 20000, .k = 0});
  // Small chunks hand on what one large block holds, or chunks are large.
  expect_top_k_as_on_cpu({.rows = 2, .count = 9000, .k = 1024});
  expect_top_k_as_on_cpu({.rows = 1, .count = 20000, .k = 3276, .spread = 4000.0f});
  expect_top_k_as_on_cpu({.rows = 1, .count = 20000, .k = 3277, .spread = 4000.0f});
  expect_top_k_as_on_cpu({.rows = 2, .count = 70000, .k = 900});
  expect_top_k_as_on_cpu({.rows = 2, .count = 70000, .k = 1000});
}

TEST(CudaTopK, RowsThatAreReadInVectors) {
  for (const int64_t count : {16, 31, 4096, 9005}) {
    expect_top_k_as_on_cpu({.rows = 3, .count = count, .k = 300, .aligned = true});
  }
}

TEST(CudaTopK, ScratchSufficesForSmallerCounts) {
  std::mt19937 generator(3);
  const auto up_to = [&](int64_t limit) { return static_cast<int64_t>(generator()) % (limit + 1); };
  for (int i = 0; i < 3000; ++i) {
    const int64_t rows = 1 + up_to(16), count = up_to(i % 2 ? 300000 : 20000);
    const int64_t k = up_to(cuda::kTopKMax);
    ASSERT_GE(cuda::top_k_scratch_bytes(rows, count, k),
              cuda::top_k_scratch_bytes(rows, up_to(count), up_to(k)));
  }
}

TEST(CudaTopK, RowsThatWantFewer) {
  for (const int64_t count : {17, 4097, 20000}) {
    expect_top_k_as_on_cpu({.rows = 4, .count = count, .k = 300, .differs = true});
    expect_top_k_as_on_cpu({.rows = 2, .count = count, .k = 2, .differs = true});
  }
}

TEST(CudaTopK, RefusesWhatItsLevelsCannotDo) {
  const Status status = cuda::top_k({.rows = 1, .count = 20000, .k = 5000}, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  EXPECT_NE(status.message().find("must be 0..4096, got 5000"), std::string::npos)
      << status.message();
}

TEST(CudaGroupMax, AsOnCpu) {
  for (const int64_t group_tokens : {1, 2, 3, 4, 7, 16, 32, 63, 64}) {
    for (const int64_t tokens : {0, 1, 63, 64, 1023, 2500}) {
      GuardedBuffer<float> scores(scores_with_ties(3, tokens, 30.0f));
      const int64_t groups = (tokens + group_tokens - 1) / group_tokens;
      std::vector<float> expected(3 * groups);
      for (int64_t row = 0; row < 3; ++row) {
        group_max({.scores = scores.data() + row * tokens,
                   .group_scores = expected.data() + row * groups,
                   .tokens = tokens,
                   .group_tokens = group_tokens});
      }
      in_every_order([&] {
        GuardedBuffer<float> maxima(3 * groups);
        expect_ok(cuda::group_max({.scores = scores.data(),
                                   .group_scores = maxima.data(),
                                   .rows = 3,
                                   .tokens = tokens,
                                   .group_tokens = group_tokens},
                                  nullptr));
        EXPECT_EQ(maxima.copy(), expected) << tokens << " / " << group_tokens;
      });
    }
  }
}

template <typename T>
void expect_scores_as_on_cpu(const SelectShape& shape) {
  SummaryCase<T> summary(shape);
  const std::vector<float> expected = summary.expected();
  in_every_order([&] {
    const std::vector<float> scores = summary.on_device();
    for (size_t i = 0; i < scores.size(); ++i) {
      ASSERT_NEAR(scores[i], expected[i], 1e-4 * (1 + std::abs(expected[i])) * 3) << i;
    }
  });
}

TEST(CudaLowRankScore, AsOnCpu) {
  for (const SelectShape& shape :
       {SelectShape{1, 16, 1, 1, 16}, SelectShape{2, 1040, 48, 1, 512},
        SelectShape{2, 96, 7, 5, 48}, SelectShape{1, 64, 200, 16, 64}, SelectShape{3, 0, 8, 2, 16},
        SelectShape{1, 32, 65, 2, 1024}, SelectShape{2, 608, 32, 4, 80},
        SelectShape{1, 48, 300, 5, 48}}) {
    expect_scores_as_on_cpu<float>(shape);
    expect_scores_as_on_cpu<BFloat16>(shape);
    expect_scores_as_on_cpu<Float16>(shape);
    expect_scores_as_on_cpu<int8_t>(shape);
  }
}

/// The same choice as group_max and top_k of the CPU make of the device's own scores.
template <typename T>
void expect_choice_as_on_cpu(const SelectShape& s, int64_t group_tokens, int64_t k) {
  SummaryCase<T> summary(s);
  Restrictions limits(s);
  const int64_t groups = s.tokens / group_tokens;
  emulated::order = emulated::Order::kRising;
  std::vector<float> scores = summary.on_device();
  std::vector<int32_t> expected(s.batch * s.queries * k, -1), expected_counts;
  for (int64_t row = 0; row < s.batch * s.queries; ++row) {
    const int64_t b = row / s.queries;
    float* own = scores.data() + row * s.tokens;
    for (int64_t t = 0; t < s.tokens; ++t) own[t] = limits.counts(b, t) ? own[t] : kNever;
    std::vector<float> maxima(groups + 1);
    group_max({.scores = own,
               .group_scores = maxima.data(),
               .tokens = groups * group_tokens,
               .group_tokens = group_tokens});
    for (int e = 0; e < 2; ++e) {
      const int32_t group = limits.excluded[2 * b + e];
      if (group >= 0 && group < groups) maxima[group] = kNever;
    }
    expected_counts.push_back(static_cast<int32_t>(top_k(
        {.scores = maxima.data(), .indices = expected.data() + row * k, .count = groups, .k = k})));
  }
  in_every_order([&] {
    GuardedBuffer<int32_t> indices(s.batch * s.queries * k), chosen(s.batch * s.queries);
    cuda::BatchSelectArgs args = {.summary = summary.table(),
                                  .query = summary.query.data(),
                                  .first_tokens = limits.first.data(),
                                  .last_tokens = limits.last.data(),
                                  .valid = limits.valid.data(),
                                  .valid_stride = limits.words,
                                  .excluded = limits.excluded.data(),
                                  .excluded_max = 2,
                                  .indices = indices.data(),
                                  .chosen = chosen.data(),
                                  .batch = s.batch,
                                  .queries = s.queries,
                                  .groups = groups,
                                  .group_tokens = group_tokens,
                                  .k = k};
    GuardedBuffer<char> scratch(cuda::select_groups_scratch_bytes(args));
    args.scratch = scratch.data();
    expect_ok(cuda::select_groups(args, nullptr));
    EXPECT_EQ(chosen.copy(), expected_counts) << group_tokens;
    EXPECT_EQ(indices.copy(), expected) << group_tokens;
  });
}

TEST(CudaSelectGroups, AsOnCpu) {
  for (const int64_t group_tokens : {1, 3, 4, 16, 63, 64}) {
    const int64_t tokens = std::lcm<int64_t>(group_tokens, 16) * (group_tokens < 8 ? 13 : 2);
    expect_choice_as_on_cpu<float>({3, tokens, 9, 1, 1008}, group_tokens, 20);
    expect_choice_as_on_cpu<BFloat16>({3, tokens, 32, 5, 48}, group_tokens, 7);
    expect_choice_as_on_cpu<int8_t>({2, tokens, 16, 2, 512}, group_tokens, 200);
  }
  expect_choice_as_on_cpu<Float16>({1, 16400, 8, 1, 1024}, 1, 50);
}

}  // namespace
}  // namespace kvswap
