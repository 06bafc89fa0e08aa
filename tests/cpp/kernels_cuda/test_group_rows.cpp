// Rows of groups, and what they are asked with, against the CPU's.

#include <cmath>
#include <limits>

#include "kernels/cuda/kernels.h"
#include "kernels/group_rows.h"
#include "kernels/low_rank_score.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

struct RowsShape {
  int64_t groups, group_tokens, first_row, kv_heads, head_dim;
};

/// Keys with NaN and infinite ones, and groups of which some tokens count, or none.
template <typename K>
struct RowsCase {
  explicit RowsCase(const RowsShape& s)
      : shape(s),
        token_stride(s.kv_heads * s.head_dim + 3),
        keys(random_elements<K>(s.groups * s.group_tokens * token_stride, 5)),
        valid(s.groups) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity};
    for (int64_t g = 0; g < s.groups; ++g) {
      valid[g] = g % 5 == 1 ? 0 : g % 5 == 3 ? 0x3333333333333333 : ~uint64_t{0};
      if (g % 7 == 4) keys[g * s.group_tokens * token_stride] = from_float<K>(bad[g % 3]);
    }
  }
  int64_t row_elements(GroupRow row) const {
    return numbers_of(row) * shape.kv_heads * shape.head_dim;
  }
  int64_t rows() const { return (shape.first_row + shape.groups + 15) / 16 * 16; }

  RowsShape shape;
  int64_t token_stride;
  GuardedBuffer<K> keys;
  GuardedBuffer<uint64_t> valid;
};

/// Two pieces, the second one group shorter and without padding.
template <typename K, typename S>
void expect_rows_as_on_cpu(const RowsShape& shape, GroupRow row) {
  constexpr bool kIsInt8 = std::is_same_v<S, int8_t>;
  RowsCase<K> of(shape);
  const int64_t elements = of.rows() * of.row_elements(row);
  std::vector<S> expected(2 * elements);
  std::vector<float> expected_scales(2 * of.rows());
  for (int64_t i = 0; i < 2; ++i) {
    summarize_groups({.keys = of.keys.data(),
                      .head_stride = shape.head_dim,
                      .token_stride = of.token_stride,
                      .valid = i == 0 ? of.valid.data() : nullptr,
                      .summary = expected.data() + i * elements,
                      .row_scale = kIsInt8 ? expected_scales.data() + i * of.rows() : nullptr,
                      .first_row = shape.first_row,
                      .groups = shape.groups - i,
                      .group_tokens = shape.group_tokens,
                      .kv_heads = shape.kv_heads,
                      .head_dim = shape.head_dim,
                      .row = row,
                      .key_dtype = dtype_of<K>(),
                      .summary_dtype = dtype_of<S>()});
  }
  in_every_order([&] {
    GuardedBuffer<S> summary(std::vector<S>(2 * elements));
    GuardedBuffer<float> scales(std::vector<float>(2 * of.rows()));
    GuardedBuffer<cuda::GroupPiece> pieces(2);
    for (int64_t i = 0; i < 2; ++i) {
      pieces[i] = {.keys = of.keys.data(),
                   .valid = i == 0 ? of.valid.data() : nullptr,
                   .summary = summary.data() + i * elements,
                   .row_scale = kIsInt8 ? scales.data() + i * of.rows() : nullptr,
                   .first_row = shape.first_row,
                   .groups = shape.groups - i};
    }
    expect_ok(cuda::summarize_groups({.pieces = pieces.data(),
                                      .count = 2,
                                      .groups_max = shape.groups,
                                      .head_stride = shape.head_dim,
                                      .token_stride = of.token_stride,
                                      .group_tokens = shape.group_tokens,
                                      .kv_heads = shape.kv_heads,
                                      .head_dim = shape.head_dim,
                                      .row = row,
                                      .key_dtype = dtype_of<K>(),
                                      .summary_dtype = dtype_of<S>()},
                                     nullptr));
    for (int64_t i = 0; i < 2 * elements; ++i) {
      const float own = to_float(summary[i]), theirs = to_float(expected[i]);
      if (std::isnan(theirs)) {
        ASSERT_TRUE(std::isnan(own)) << i;
      } else {
        ASSERT_NEAR(own, theirs, kIsInt8 ? 1.0 : 1e-6 * std::abs(theirs)) << i;
      }
    }
    for (int64_t i = 0; i < 2 * of.rows(); ++i) {
      if (std::isnan(expected_scales[i])) {
        ASSERT_TRUE(std::isnan(scales[i])) << i;
      } else {
        ASSERT_NEAR(scales[i], expected_scales[i], 1e-6 * std::abs(expected_scales[i])) << i;
      }
    }
  });
}

TEST(CudaGroupRows, AsOnCpu) {
  for (const GroupRow row : {GroupRow::kBox, GroupRow::kMean}) {
    for (const RowsShape& shape :
         {RowsShape{1, 1, 0, 1, 1}, RowsShape{33, 4, 7, 2, 80}, RowsShape{20, 3, 16, 3, 128},
          RowsShape{9, 64, 250, 1, 64}, RowsShape{12, 32, 0, 1, 96}}) {
      expect_rows_as_on_cpu<float, float>(shape, row);
      expect_rows_as_on_cpu<BFloat16, BFloat16>(shape, row);
      expect_rows_as_on_cpu<Float16, Float16>(shape, row);
      expect_rows_as_on_cpu<BFloat16, int8_t>(shape, row);
      expect_rows_as_on_cpu<Float16, int8_t>(shape, row);
    }
  }
}

TEST(CudaGroupRows, WhatCannotBeIsRefused) {
  const Status status = cuda::summarize_groups({.group_tokens = 65}, nullptr);
  EXPECT_NE(status.message().find("must be 1..64, got 65"), std::string::npos) << status.message();
  EXPECT_FALSE(
      cuda::summarize_groups({.group_tokens = 4, .summary_dtype = DType::kInt4}, nullptr).is_ok());
  EXPECT_FALSE(cuda::ask_groups({.dtype = DType::kInt8}, nullptr).is_ok());
}

struct AskShape {
  int64_t batch, queries, kv_heads, ratio, head_dim, apart;
};

/// Query array [batch / apart, queries, apart * heads, head_dim] in memory.
template <typename T>
void expect_asked_as_on_cpu(const AskShape& s, GroupRow row) {
  const int64_t heads = s.kv_heads * s.ratio;
  const int64_t token = s.apart * heads * s.head_dim;
  GuardedBuffer<T> query(random_elements<T>(s.batch / s.apart * s.queries * token, 1));
  const int64_t width = numbers_of(row) * s.kv_heads * s.head_dim;
  in_every_order([&] {
    GuardedBuffer<float> asked(s.batch * s.queries * width);
    expect_ok(cuda::ask_groups({.query = query.data(),
                                .batch_stride = s.queries * token,
                                .head_stride = s.head_dim,
                                .query_stride = token,
                                .asked = asked.data(),
                                .batch = s.batch,
                                .queries = s.queries,
                                .heads = heads,
                                .kv_heads = s.kv_heads,
                                .head_dim = s.head_dim,
                                .row = row,
                                .weight = 0.75f,
                                .dtype = dtype_of<T>(),
                                .heads_apart = s.apart},
                               nullptr));
    for (int64_t i = 0; i < s.batch * s.queries; ++i) {
      const int64_t sequence = i / s.queries;
      std::vector<float> expected(width);
      ask_groups({.query = query.data() + (sequence / s.apart * s.queries + i % s.queries) * token +
                           sequence % s.apart * heads * s.head_dim,
                  .head_stride = s.head_dim,
                  .asked = expected.data(),
                  .heads = heads,
                  .last_head = heads,
                  .kv_heads = s.kv_heads,
                  .head_dim = s.head_dim,
                  .row = row,
                  .weight = 0.75f,
                  .dtype = dtype_of<T>()});
      for (int64_t c = 0; c < width; ++c) {
        ASSERT_NEAR(asked[i * width + c], expected[c], 1e-6 * (1 + std::abs(expected[c]))) << c;
      }
    }
  });
}

TEST(CudaGroupRows, AreAskedAsOnCpu) {
  for (const GroupRow row : {GroupRow::kBox, GroupRow::kMean}) {
    expect_asked_as_on_cpu<float>({2, 3, 2, 4, 64, 1}, row);
    expect_asked_as_on_cpu<BFloat16>({6, 2, 1, 3, 96, 3}, row);
    expect_asked_as_on_cpu<Float16>({1, 1, 4, 1, 128, 1}, row);
    expect_asked_as_on_cpu<float>({0, 1, 1, 1, 8, 1}, row);
  }
}

}  // namespace
}  // namespace kvswap
