#include <cmath>
#include <limits>

#include "kernels/cuda/kernels.h"
#include "kernels/low_rank_score.h"
#include "kernels/project.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

struct ProjectShape {
  int64_t tokens, first_row, kv_heads, head_dim, rank;
  int64_t gap = 3;  // 8: rows are whole vectors, as tensor cores want them
};

/// Two pieces, the second one token shorter, against two calls on the CPU.
template <typename Key, typename Row>
void expect_keys_as_on_cpu(const ProjectShape& s) {
  constexpr bool kIsInt8 = std::is_same_v<Row, int8_t>;
  const int64_t token_stride = s.kv_heads * s.head_dim + s.gap;
  const int64_t dims = s.kv_heads * s.head_dim;
  GuardedBuffer<Key> keys(random_elements<Key>(s.tokens * token_stride, 11));
  std::vector<float> factors = random_elements<float>(dims * s.rank, 12);
  for (float& factor : factors) factor /= std::sqrt(static_cast<float>(dims));
  GuardedBuffer<float> projection(factors);
  const int64_t rows = (s.first_row + s.tokens + 15) / 16 * 16;
  std::vector<Row> expected(2 * rows * s.rank);
  std::vector<float> expected_scales(2 * rows);
  for (int64_t i = 0; i < 2; ++i) {
    project_keys({.keys = keys.data(),
                  .head_stride = s.head_dim,
                  .token_stride = token_stride,
                  .projection = projection.data(),
                  .summary = expected.data() + i * rows * s.rank,
                  .token_scale = kIsInt8 ? expected_scales.data() + i * rows : nullptr,
                  .first_row = s.first_row,
                  .tokens = s.tokens - i,
                  .kv_heads = s.kv_heads,
                  .head_dim = s.head_dim,
                  .rank = s.rank,
                  .key_dtype = dtype_of<Key>(),
                  .summary_dtype = dtype_of<Row>()});
  }
  in_every_order([&] {
    GuardedBuffer<Row> summary(std::vector<Row>(2 * rows * s.rank));
    GuardedBuffer<float> scales(std::vector<float>(2 * rows));
    GuardedBuffer<cuda::ProjectPiece> pieces(2);
    for (int64_t i = 0; i < 2; ++i) {
      pieces[i] = {.keys = keys.data(),
                   .summary = summary.data() + i * rows * s.rank,
                   .token_scale = kIsInt8 ? scales.data() + i * rows : nullptr,
                   .first_row = s.first_row,
                   .tokens = s.tokens - i};
    }
    expect_ok(cuda::project_keys({.pieces = pieces.data(),
                                  .count = 2,
                                  .tokens_max = s.tokens,
                                  .head_stride = s.head_dim,
                                  .token_stride = token_stride,
                                  .projection = projection.data(),
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.head_dim,
                                  .rank = s.rank,
                                  .key_dtype = dtype_of<Key>(),
                                  .summary_dtype = dtype_of<Row>()},
                                 nullptr));
    for (int64_t i = 0; i < 2 * rows * s.rank; ++i) {
      const double tolerance = kIsInt8 ? 1.0 : tolerance_of<Row>() * 3;
      ASSERT_NEAR(to_float(summary[i]), to_float(expected[i]), tolerance) << i;
    }
    for (int64_t i = 0; i < 2 * rows; ++i) {
      ASSERT_NEAR(scales[i], expected_scales[i], 1e-4 * std::abs(expected_scales[i]));
    }
  });
}

TEST(CudaProjectKeys, AsOnCpu) {
  for (const ProjectShape& shape :
       {ProjectShape{1, 0, 1, 64, 4}, ProjectShape{37, 5, 2, 80, 32},
        ProjectShape{130, 16, 2, 64, 65}, ProjectShape{4, 1020, 2, 128, 48},
        ProjectShape{64, 0, 1, 96, 130}, ProjectShape{300, 5, 2, 40, 65, 8},
        ProjectShape{70, 0, 1, 128, 32, 8}}) {
    expect_keys_as_on_cpu<float, float>(shape);
    expect_keys_as_on_cpu<BFloat16, BFloat16>(shape);
    expect_keys_as_on_cpu<Float16, Float16>(shape);
    expect_keys_as_on_cpu<BFloat16, int8_t>(shape);
  }
}

/// Token 1 of 3 has a key that is not finite.
template <typename Row>
void expect_no_numbers_of(float bad) {
  constexpr bool kIsInt8 = std::is_same_v<Row, int8_t>;
  const int64_t head_dim = 8, rank = 70;
  GuardedBuffer<float> keys(random_elements<float>(3 * head_dim, 1));
  keys[head_dim + 2] = bad;
  GuardedBuffer<float> projection(random_elements<float>(head_dim * rank, 2));
  in_every_order([&] {
    GuardedBuffer<Row> summary(std::vector<Row>(16 * rank));
    GuardedBuffer<float> scales(16);
    GuardedBuffer<cuda::ProjectPiece> pieces(1);
    pieces[0] = {.keys = keys.data(),
                 .summary = summary.data(),
                 .token_scale = kIsInt8 ? scales.data() : nullptr,
                 .tokens = 3};
    expect_ok(cuda::project_keys({.pieces = pieces.data(),
                                  .count = 1,
                                  .tokens_max = 3,
                                  .head_stride = 3 * head_dim,
                                  .token_stride = head_dim,
                                  .projection = projection.data(),
                                  .kv_heads = 1,
                                  .head_dim = head_dim,
                                  .rank = rank,
                                  .key_dtype = DType::kFloat32,
                                  .summary_dtype = dtype_of<Row>()},
                                 nullptr));
    for (int64_t token = 0; token < 3; ++token) {
      if (kIsInt8) {
        EXPECT_EQ(std::isnan(scales[token]), token == 1) << bad;
        continue;
      }
      for (int64_t r = 0; r < rank; ++r) {
        EXPECT_EQ(std::isnan(to_float(summary[r * 16 + token])), token == 1) << bad;
      }
    }
  });
}

TEST(CudaProjectKeys, WhatIsNotFiniteIsNoNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    expect_no_numbers_of<float>(bad);
    expect_no_numbers_of<BFloat16>(bad);
    expect_no_numbers_of<Float16>(bad);
    expect_no_numbers_of<int8_t>(bad);
  }
}

template <typename T>
void expect_query_as_on_cpu(int64_t batch, int64_t queries, int64_t kv_heads, int64_t ratio,
                            int64_t head_dim, int64_t rank) {
  const int64_t heads = kv_heads * ratio;
  const int64_t dims = kv_heads * head_dim;
  GuardedBuffer<T> query(random_elements<T>(batch * queries * heads * head_dim, 1));
  GuardedBuffer<float> projection(random_elements<float>(dims * rank, 2));
  in_every_order([&] {
    GuardedBuffer<float> projected(batch * queries * rank);
    // [batch, queries, heads, head_dim] in memory.
    expect_ok(cuda::project_query({.query = query.data(),
                                   .batch_stride = queries * heads * head_dim,
                                   .head_stride = head_dim,
                                   .query_stride = heads * head_dim,
                                   .projection = projection.data(),
                                   .projected = projected.data(),
                                   .batch = batch,
                                   .queries = queries,
                                   .heads = heads,
                                   .kv_heads = kv_heads,
                                   .head_dim = head_dim,
                                   .rank = rank,
                                   .dtype = dtype_of<T>()},
                                  nullptr));
    for (int64_t row = 0; row < batch * queries; ++row) {
      std::vector<float> expected(rank);
      project_query({.query = query.data() + row * heads * head_dim,
                     .head_stride = head_dim,
                     .projection = projection.data(),
                     .projected = expected.data(),
                     .heads = heads,
                     .kv_heads = kv_heads,
                     .head_dim = head_dim,
                     .rank = rank,
                     .dtype = dtype_of<T>()});
      for (int64_t r = 0; r < rank; ++r) {
        ASSERT_NEAR(projected[row * rank + r], expected[r], 2e-5 * (dims + std::abs(expected[r])));
      }
    }
  });
}

TEST(CudaProjectQuery, AsOnCpu) {
  expect_query_as_on_cpu<float>(2, 3, 2, 4, 64, 48);
  expect_query_as_on_cpu<BFloat16>(1, 1, 1, 1, 96, 7);
  expect_query_as_on_cpu<Float16>(2, 1, 20, 2, 128, 9);  // more dimensions than stand in one piece
  expect_query_as_on_cpu<BFloat16>(0, 1, 2, 1, 64, 8);
}

/// Row b of the batch is of head b % 2 of query b / 2, with that head's part of the projection.
TEST(CudaProjectQuery, OfHeadsApartTakesEachOnesPart) {
  const int64_t batch = 4, apart = 2, queries = 3, ratio = 3, dim = 64, rank = 12;
  const int64_t heads = apart * ratio;
  GuardedBuffer<float> query(random_elements<float>(batch / apart * queries * heads * dim, 1));
  GuardedBuffer<float> projection(random_elements<float>(apart * dim * rank, 2));
  in_every_order([&] {
    GuardedBuffer<float> projected(batch * queries * rank);
    expect_ok(cuda::project_query({.query = query.data(),
                                   .batch_stride = queries * heads * dim,
                                   .head_stride = dim,
                                   .query_stride = heads * dim,
                                   .projection = projection.data(),
                                   .projected = projected.data(),
                                   .batch = batch,
                                   .queries = queries,
                                   .heads = ratio,
                                   .kv_heads = 1,
                                   .head_dim = dim,
                                   .rank = rank,
                                   .heads_apart = apart},
                                  nullptr));
    for (int64_t row = 0; row < batch * queries; ++row) {
      const int64_t head = row / queries % apart;
      std::vector<float> expected(rank);
      project_query({.query = query.data() + row / queries / apart * queries * heads * dim +
                              row % queries * heads * dim + head * ratio * dim,
                     .head_stride = dim,
                     .projection = projection.data() + head * dim * rank,
                     .projected = expected.data(),
                     .heads = ratio,
                     .kv_heads = 1,
                     .head_dim = dim,
                     .rank = rank});
      for (int64_t r = 0; r < rank; ++r) {
        ASSERT_NEAR(projected[row * rank + r], expected[r], 2e-5 * (dim + std::abs(expected[r])));
      }
    }
  });
}

}  // namespace
}  // namespace kvswap
