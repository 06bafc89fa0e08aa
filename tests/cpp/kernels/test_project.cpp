#include <cmath>

#include "kernels/kernel_test.h"
#include "kernels/low_rank_score.h"
#include "kernels/project.h"

namespace kvswap {
namespace {

struct Shape {
  int64_t tokens, first_row, kv_heads, head_dim, rank;
};

/// K laid out [tokens, kv_heads, head_dim] (NHD) with a gap after each token.
template <typename T>
struct Keys {
  explicit Keys(const Shape& shape)
      : token_stride(shape.kv_heads * shape.head_dim + 3),
        head_stride(shape.head_dim),
        elements(random_elements<T>(shape.tokens * token_stride + 1, 11)) {}

  double at(int64_t head, int64_t token, int64_t d) const {
    return to_float(elements[head * head_stride + token * token_stride + d]);
  }

  int64_t token_stride;
  int64_t head_stride;
  std::vector<T> elements;
};

template <typename Key, typename Row>
void expect_matches_reference(const Shape& shape) {
  const Keys<Key> keys(shape);
  const int64_t dims = shape.kv_heads * shape.head_dim;
  const auto projection = random_elements<float>(dims * shape.rank, 12);
  const int64_t blocks = (shape.first_row + shape.tokens) / kSummaryBlock + 1;
  std::vector<Row> summary(blocks * shape.rank * kSummaryBlock);
  std::vector<float> token_scale(blocks * kSummaryBlock, -1.0f);
  project_keys({.keys = keys.elements.data(),
                .head_stride = keys.head_stride,
                .token_stride = keys.token_stride,
                .projection = projection.data(),
                .summary = summary.data(),
                .token_scale = std::is_same_v<Row, int8_t> ? token_scale.data() : nullptr,
                .first_row = shape.first_row,
                .tokens = shape.tokens,
                .kv_heads = shape.kv_heads,
                .head_dim = shape.head_dim,
                .rank = shape.rank,
                .key_dtype = dtype_of<Key>(),
                .summary_dtype = dtype_of<Row>()});
  for (int64_t token = 0; token < shape.tokens; ++token) {
    const int64_t row = shape.first_row + token;
    const double scale = std::is_same_v<Row, int8_t> ? token_scale[row] : 1.0;
    double limit = 0;
    for (int64_t r = 0; r < shape.rank; ++r) {
      double expected = 0;
      for (int64_t d = 0; d < dims; ++d) {
        expected +=
            keys.at(d / shape.head_dim, token, d % shape.head_dim) * projection[d * shape.rank + r];
      }
      limit = std::max(limit, std::abs(expected));
      const int64_t place =
          (row / kSummaryBlock * shape.rank + r) * kSummaryBlock + row % kSummaryBlock;
      const double half_step = std::is_same_v<Row, int8_t> ? 0.501 * scale : 0;
      const double tolerance = tolerance_of<Row>() * (1 + std::abs(expected));
      ASSERT_NEAR(to_float(summary[place]) * scale, expected,
                  half_step ? half_step : tolerance * std::sqrt(dims))
          << token << " " << r;
    }
    EXPECT_TRUE((!std::is_same_v<Row, int8_t>) || std::abs(scale - limit / 127) <= 1e-3 * limit);
  }
  EXPECT_TRUE(shape.first_row == 0 || to_float(summary[0]) == 0.0f) << "row before the first";
}

class ProjectKeys : public KernelTest {};
class ProjectQuery : public KernelTest {};

TEST_P(ProjectKeys, MatchesReference) {
  for (const Shape& shape :
       {Shape{1, 0, 1, 64, 4}, Shape{1, 7, 2, 64, 32}, Shape{16, 16, 8, 64, 32},
        Shape{37, 5, 2, 80, 48}, Shape{70, 0, 4, 128, 64}, Shape{9, 3, 1, 72, 65},
        Shape{0, 0, 2, 64, 8}}) {
    expect_matches_reference<float, float>(shape);
    expect_matches_reference<BFloat16, BFloat16>(shape);
    expect_matches_reference<Float16, Float16>(shape);
    expect_matches_reference<BFloat16, int8_t>(shape);
    expect_matches_reference<float, int8_t>(shape);
  }
}

TEST_P(ProjectKeys, ColumnsThatStandApartAreTheSame) {
  constexpr int64_t kTokens = 37, kFirst = 5, kRank = 12, kRest = 7, kBlocks = 3;
  const Keys<BFloat16> keys({kTokens, kFirst, 2, 64, kRank});
  const auto projection = random_elements<float>(2 * 64 * kRank, 12);
  std::vector<int8_t> together(kBlocks * kRank * kSummaryBlock);
  std::vector<int8_t> first(kBlocks * (kRank - kRest) * kSummaryBlock);
  std::vector<int8_t> rest(kBlocks * kRest * kSummaryBlock);
  std::vector<float> scales(kBlocks * kSummaryBlock), scales_apart(kBlocks * kSummaryBlock);
  ProjectKeysArgs args = {.keys = keys.elements.data(),
                          .head_stride = keys.head_stride,
                          .token_stride = keys.token_stride,
                          .projection = projection.data(),
                          .summary = together.data(),
                          .token_scale = scales.data(),
                          .first_row = kFirst,
                          .tokens = kTokens,
                          .kv_heads = 2,
                          .head_dim = 64,
                          .rank = kRank,
                          .key_dtype = DType::kBFloat16,
                          .summary_dtype = DType::kInt8};
  project_keys(args);
  args.summary = first.data();
  args.rest = rest.data();
  args.rest_rank = kRest;
  args.token_scale = scales_apart.data();
  project_keys(args);
  EXPECT_EQ(scales, scales_apart);
  std::vector<int8_t> joined;
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t own = (kRank - kRest) * kSummaryBlock, others = kRest * kSummaryBlock;
    joined.insert(joined.end(), first.begin() + block * own, first.begin() + (block + 1) * own);
    joined.insert(joined.end(), rest.begin() + block * others, rest.begin() + (block + 1) * others);
  }
  EXPECT_EQ(joined, together);
}

/// The row of one token of one head.
struct TokenRow {
  TokenRow(const std::vector<float>& keys, const std::vector<float>& projection, DType dtype) {
    const auto head_dim = static_cast<int64_t>(keys.size());
    const int64_t rank = static_cast<int64_t>(projection.size()) / head_dim;
    summary.assign(rank * kSummaryBlock, 5);
    token_scale.assign(kSummaryBlock, 5.0f);
    project_keys({.keys = keys.data(),
                  .head_stride = head_dim,
                  .token_stride = head_dim,
                  .projection = projection.data(),
                  .summary = summary.data(),
                  .token_scale = token_scale.data(),
                  .tokens = 1,
                  .kv_heads = 1,
                  .head_dim = head_dim,
                  .rank = rank,
                  .summary_dtype = dtype});
  }

  std::vector<int8_t> summary;
  std::vector<float> token_scale;
};

TEST_P(ProjectKeys, ZeroKeysGiveZeroRowsInInt8) {
  const TokenRow row(std::vector<float>(64, 0.0f), random_elements<float>(64 * 8, 1), DType::kInt8);
  EXPECT_EQ(row.summary[0], 0);
  EXPECT_EQ(row.token_scale[0], 0.0f);
}

TEST_P(ProjectKeys, TinyKeysAreWithinHalfALevel) {
  constexpr int64_t kRank = 8;
  const auto projection = random_elements<float>(kRank, 1);
  for (const DType dtype : {DType::kInt8, DType::kInt4}) {
    const TokenRow row({1e-39f}, projection, dtype);
    for (int64_t r = 0; r < kRank; ++r) {
      const Int4Pair pair{row.summary[r / 2 * kSummaryBlock]};
      const int8_t of_pair = r % 2 == 0 ? low_half(pair) : high_half(pair);
      const int8_t level = dtype == DType::kInt8 ? row.summary[r * kSummaryBlock] : of_pair;
      EXPECT_NEAR(level * row.token_scale[0], 1e-39f * projection[r], 0.501f * row.token_scale[0]);
    }
  }
}

template <typename T>
void expect_query_matches_reference(int64_t kv_heads, int64_t ratio, int64_t head_dim,
                                    int64_t rank) {
  const int64_t heads = kv_heads * ratio;
  const int64_t head_stride = head_dim + 2;
  const auto query = random_elements<T>(heads * head_stride, 21);
  const auto projection = random_elements<float>(kv_heads * head_dim * rank, 22);
  std::vector<float> projected(rank + 1, -7.0f);
  project_query({.query = query.data(),
                 .head_stride = head_stride,
                 .projection = projection.data(),
                 .projected = projected.data(),
                 .heads = heads,
                 .kv_heads = kv_heads,
                 .head_dim = head_dim,
                 .rank = rank,
                 .dtype = dtype_of<T>()});
  for (int64_t r = 0; r < rank; ++r) {
    double expected = 0;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t d = 0; d < head_dim; ++d) {
        expected += double{to_float(query[head * head_stride + d])} *
                    projection[(head / ratio * head_dim + d) * rank + r];
      }
    }
    EXPECT_NEAR(projected[r], expected, 1e-4 * std::sqrt(heads * head_dim)) << r;
  }
  EXPECT_EQ(projected[rank], -7.0f) << "written past the end";
}

TEST_P(ProjectQuery, MatchesReference) {
  for (const int64_t ratio : {1, 4, 16}) {
    for (const int64_t rank : {1, 7, 16, 32, 50}) {
      expect_query_matches_reference<float>(2, ratio, 64, rank);
      expect_query_matches_reference<BFloat16>(1, ratio, 72, rank);
      expect_query_matches_reference<Float16>(3, ratio, 80, rank);
    }
  }
}

KVSWAP_EVERY_LEVEL(ProjectKeys);
KVSWAP_EVERY_LEVEL(ProjectQuery);

}  // namespace
}  // namespace kvswap
