// Scores by mass, and each head's projected query, against the CPU's kernels.

#include <cmath>
#include <limits>

#include "kernels/cuda/kernels.h"
#include "kernels/group_mass.h"
#include "kernels/group_topk.h"
#include "kernels/int8_score.h"
#include "kernels/project.h"
#include "kernels_cuda/device_test.h"
#include "kernels_cuda/summary_case.h"

namespace kvswap {
namespace {

/// By the kernel, for so many rows of queries: [rows, groups].
std::vector<float> scores_of(const cuda::BatchSelectArgs& args, int64_t rows) {
  GuardedBuffer<float> scores(rows * args.groups);
  GuardedBuffer<char> scratch(cuda::mass_scores_scratch_bytes(args));
  expect_ok(cuda::mass_scores({.select = args,
                               .group_scores = scores.data(),
                               .score_stride = args.groups,
                               .scratch = scratch.data()},
                              nullptr));
  return {scores.data(), scores.data() + rows * args.groups};
}

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct MassShape {
  int64_t batch, tokens, rank, queries, heads, group_tokens, chunk_tokens;
  HeadJoin join = HeadJoin::kSum;
};

/// A batch whose queries are those of all heads, side by side.
template <typename T>
struct MassCase {
  explicit MassCase(const MassShape& s)
      : shape(s),
        groups(s.tokens / s.group_tokens),
        of_heads({s.batch, s.tokens, s.rank, s.queries * s.heads, s.chunk_tokens}),
        summary(of_heads),
        limits(of_heads) {}

  /// [batch, queries, groups]
  std::vector<float> expected() {
    const int64_t rows = shape.queries * shape.heads;
    std::vector<float> scales(shape.batch * rows, 1.0f);
    if constexpr (std::is_same_v<T, int8_t>) round_queries(scales);
    std::vector<float> logits = summary.expected();  // [batch, queries, heads, tokens]
    std::vector<float> scores;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t row = b * rows; row < (b + 1) * rows; ++row) {
        for (int64_t t = 0; t < shape.tokens; ++t) {
          float& logit = logits[row * shape.tokens + t];
          logit = is_candidate(b, t) ? logit * scales[row] : kNever;
        }
      }
      for (int64_t q = 0; q < shape.queries; ++q) {
        scores.resize(scores.size() + groups);
        std::vector<float> own;  // [heads, groups * group_tokens]
        for (int64_t h = 0; h < shape.heads; ++h) {
          const auto* first = logits.data() + (b * rows + q * shape.heads + h) * shape.tokens;
          own.insert(own.end(), first, first + groups * shape.group_tokens);
        }
        group_mass({.logits = own.data(),
                    .group_scores = scores.data() + scores.size() - groups,
                    .tokens = groups * shape.group_tokens,
                    .group_tokens = shape.group_tokens,
                    .heads = shape.heads,
                    .join = shape.join});
      }
    }
    return scores;
  }

  cuda::BatchSelectArgs select() {
    return {.summary = summary.table(),
            .query = summary.query.data(),
            .heads = shape.heads,
            .join = shape.join,
            .first_tokens = limits.first.data(),
            .last_tokens = limits.last.data(),
            .valid = limits.valid.data(),
            .valid_stride = limits.words,
            .excluded = limits.excluded.data(),
            .excluded_max = 2,
            .batch = shape.batch,
            .queries = shape.queries,
            .groups = groups,
            .group_tokens = shape.group_tokens};
  }

  bool is_candidate(int64_t b, int64_t token) {
    const int64_t group = token / shape.group_tokens;
    return limits.counts(b, token) && group != limits.excluded[2 * b] &&
           group != limits.excluded[2 * b + 1];
  }
  void round_queries(std::vector<float>& scales) {
    std::vector<int8_t> levels(int8_stride(shape.rank));
    for (size_t row = 0; row < scales.size(); ++row) {
      float* query = summary.query.data() + row * shape.rank;
      quantize_queries({.query = query,
                        .quantized = levels.data(),
                        .scales = &scales[row],
                        .rank = shape.rank,
                        .queries = 1});
      std::copy_n(levels.begin(), shape.rank, query);
    }
  }

  MassShape shape;
  int64_t groups;
  SelectShape of_heads;
  SummaryCase<T> summary;
  Restrictions limits;
};

template <typename T>
void expect_mass_as_on_cpu(const MassShape& shape) {
  const std::vector<float> expected = MassCase<T>(shape).expected();
  MassCase<T> own(shape);
  cuda::BatchSelectArgs args = own.select();
  in_every_order([&] {
    const std::vector<float> scores =
        scores_of(args, static_cast<int64_t>(expected.size()) / own.groups);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == kNever) {
        ASSERT_EQ(scores[i], kNever) << i;
      } else {
        ASSERT_NEAR(scores[i], expected[i], 1e-7 + 1e-3 * expected[i]) << i;
      }
    }
  });
}

TEST(CudaMassScores, AsOnCpu) {
  for (const HeadJoin join : {HeadJoin::kSum, HeadJoin::kMax}) {
    expect_mass_as_on_cpu<float>({2, 544, 9, 1, 6, 4, 512, join});
    expect_mass_as_on_cpu<BFloat16>({2, 96, 32, 3, 5, 3, 48, join});
    expect_mass_as_on_cpu<int8_t>({2, 80, 16, 2, 4, 16, 80, join});
    expect_mass_as_on_cpu<Float16>({1, 64, 200, 1, 1, 64, 64, join});
    expect_mass_as_on_cpu<int8_t>({1, 48, 7, 1, 9, 1, 16, join});
  }
}

TEST(CudaMassScores, SelectGroupsChoosesTheirBest) {
  MassCase<int8_t> own({2, 128, 16, 2, 4, 4, 64});
  cuda::BatchSelectArgs args = own.select();
  const int64_t rows = 4, k = 20;
  const std::vector<float> scores = scores_of(args, rows);
  std::vector<int32_t> expected(rows * k, -1), expected_counts;
  for (int64_t row = 0; row < rows; ++row) {
    expected_counts.push_back(
        static_cast<int32_t>(top_k({.scores = scores.data() + row * own.groups,
                                    .indices = expected.data() + row * k,
                                    .count = own.groups,
                                    .k = k})));
  }
  in_every_order([&] {
    GuardedBuffer<int32_t> indices(rows * k), chosen(rows);
    args.indices = indices.data();
    args.chosen = chosen.data();
    args.k = k;
    GuardedBuffer<char> scratch(cuda::select_groups_scratch_bytes(args));
    args.scratch = scratch.data();
    expect_ok(cuda::select_groups(args, nullptr));
    EXPECT_EQ(chosen.copy(), expected_counts);
    EXPECT_EQ(indices.copy(), expected);
  });
}

TEST(CudaMassScores, AHeadWithoutNumbersKnowsNothing) {
  MassCase<float> own({1, 64, 8, 1, 2, 4, 64});
  for (int64_t r = 0; r < 8; ++r) own.summary.query[r] = std::numeric_limits<float>::quiet_NaN();
  const cuda::BatchSelectArgs args = own.select();
  const std::vector<float> scores = scores_of(args, 1);
  float total = 0;
  for (int64_t g = 0; g < own.groups; ++g) {
    if (scores[g] > kNever) total += scores[g];
  }
  EXPECT_NEAR(total, 1, 1e-5) << "the other head's softmax";
}

TEST(CudaMassScores, AGroupWithWhatIsNoNumberIsWorthMoreThanAny) {
  MassCase<float> own({1, 64, 8, 1, 2, 4, 64});
  int64_t token = 16;
  while (!own.is_candidate(0, token)) ++token;
  for (int64_t r = 0; r < 8; ++r) {
    own.summary.rows[(token / 16 * 8 + r) * 16 + token % 16] = NAN;
  }
  const std::vector<float> expected = own.expected();
  const cuda::BatchSelectArgs args = own.select();
  in_every_order([&] {
    const std::vector<float> scores = scores_of(args, 1);
    for (int64_t g = 0; g < own.groups; ++g) {
      EXPECT_EQ(std::isinf(scores[g]) && scores[g] > 0, g == token / 4) << g;
      if (std::isfinite(expected[g])) {
        EXPECT_NEAR(scores[g], expected[g], 1e-5);
      }
    }
  });
}

TEST(CudaProjectQuery, OfEachHeadAsOnCpu) {
  const int64_t batch = 2, heads = 6, kv_heads = 2, queries = 3, head_dim = 8, rank = 11;
  GuardedBuffer<float> query(random_elements<float>(batch * heads * queries * head_dim, 1));
  GuardedBuffer<float> projection(random_elements<float>(kv_heads * head_dim * rank, 2));
  std::vector<float> expected(batch * queries * heads * rank);
  for (int64_t i = 0; i < batch * queries * heads; ++i) {
    const int64_t head = i % heads;
    const int64_t row = i / heads;
    const int64_t at = (row / queries * heads + head) * queries + row % queries;
    project_query({.query = query.data() + at * head_dim,
                   .projection = projection.data() + head / 3 * head_dim * rank,
                   .projected = expected.data() + i * rank,
                   .heads = 1,
                   .kv_heads = 1,
                   .head_dim = head_dim,
                   .rank = rank});
    for (int64_t r = 0; r < rank; ++r) expected[i * rank + r] *= 0.25f;
  }
  in_every_order([&] {
    GuardedBuffer<float> projected(expected.size());
    expect_ok(cuda::project_query({.query = query.data(),
                                   .batch_stride = heads * queries * head_dim,
                                   .head_stride = queries * head_dim,
                                   .query_stride = head_dim,
                                   .projection = projection.data(),
                                   .projected = projected.data(),
                                   .projects = cuda::QueryHeads::kEach,
                                   .factor = 0.25f,
                                   .batch = batch,
                                   .queries = queries,
                                   .heads = heads,
                                   .kv_heads = kv_heads,
                                   .head_dim = head_dim,
                                   .rank = rank},
                                  nullptr));
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(projected[i], expected[i], 1e-5) << i;
  });
}

}  // namespace
}  // namespace kvswap
