#include <cmath>

#include "kernels/int4_rows.h"
#include "kernels/kernel_test.h"
#include "kernels/project.h"

namespace kvswap {
namespace {

class Int4Rows : public KernelTest {};

TEST(UnpackInt4, EveryByteAndColumnsThatArePaired) {
  for (const int64_t rank : {1, 2, 3, 8, 33, 512}) {
    const int64_t bytes = row_bytes(DType::kInt4, rank) * kSummaryBlock;
    const int64_t blocks = 3;
    std::vector<std::byte> packed(blocks * bytes);
    for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<std::byte>(i * 7);
    std::vector<int8_t> rows(blocks * rank * kSummaryBlock + 1, 99);
    unpack_int4({.packed = packed.data(), .rows = rows.data(), .blocks = blocks, .rank = rank});
    for (int64_t i = 0; i < blocks * rank * kSummaryBlock; ++i) {
      const int64_t block = i / (rank * kSummaryBlock);
      const int64_t column = i / kSummaryBlock % rank;
      const auto byte = std::to_integer<int>(
          packed[block * bytes + column / 2 * kSummaryBlock + i % kSummaryBlock]);
      const int half = column % 2 == 0 ? byte & 15 : byte >> 4;
      ASSERT_EQ(rows[i], half < 8 ? half : half - 16) << rank << ", " << i;
    }
    ASSERT_EQ(rows.back(), 99) << "written past the end";
    const int8_t* same = as_int8_rows(DType::kInt4, packed.data(), blocks, rank);
    EXPECT_TRUE(std::equal(rows.begin(), rows.end() - 1, same));
  }
  const std::byte row = std::byte{5};
  EXPECT_EQ(as_int8_rows(DType::kInt8, &row, 0, 4), reinterpret_cast<const int8_t*>(&row));
  EXPECT_EQ(as_int8_rows(DType::kFloat32, &row, 0, 4), nullptr);
}

struct Shape {
  int64_t tokens, first_row, rank;
};

/// What project_keys() writes beside the same rows in fp32.
void expect_nearest_levels(const Shape& shape) {
  constexpr int64_t kDims = 64;
  const auto keys = random_elements<float>(shape.tokens * kDims, 1);
  const auto projection = random_elements<float>(kDims * shape.rank, 2);
  const int64_t blocks = (shape.first_row + shape.tokens) / kSummaryBlock + 1;
  std::vector<float> exact(blocks * shape.rank * kSummaryBlock);
  std::vector<std::byte> packed(blocks * row_bytes(DType::kInt4, shape.rank) * kSummaryBlock);
  std::vector<float> scales(blocks * kSummaryBlock, -1.0f);
  ProjectKeysArgs args = {.keys = keys.data(),
                          .head_stride = kDims,
                          .token_stride = kDims,
                          .projection = projection.data(),
                          .summary = exact.data(),
                          .first_row = shape.first_row,
                          .tokens = shape.tokens,
                          .kv_heads = 1,
                          .head_dim = kDims,
                          .rank = shape.rank};
  project_keys(args);
  args.summary = packed.data();
  args.token_scale = scales.data();
  args.summary_dtype = DType::kInt4;
  project_keys(args);
  const int8_t* levels = as_int8_rows(DType::kInt4, packed.data(), blocks, shape.rank);
  for (int64_t row = 0; row < shape.first_row + shape.tokens; ++row) {
    float limit = 0;
    const auto at = [&](int64_t r) {
      return (row / kSummaryBlock * shape.rank + r) * kSummaryBlock + row % kSummaryBlock;
    };
    for (int64_t r = 0; r < shape.rank; ++r) limit = std::max(limit, std::abs(exact[at(r)]));
    if (row < shape.first_row) {
      ASSERT_EQ(scales[row], -1.0f) << "a row before the first";
      continue;
    }
    ASSERT_EQ(scales[row], limit / kInt4Levels);
    for (int64_t r = 0; r < shape.rank; ++r) {
      ASSERT_NEAR(levels[at(r)] * scales[row], exact[at(r)], 0.501f * scales[row]);
      ASSERT_LE(std::abs(levels[at(r)]), kInt4Levels);
    }
  }
}

TEST_P(Int4Rows, AreTheNearestOfFifteenLevels) {
  for (const Shape& shape :
       {Shape{1, 0, 1}, Shape{1, 7, 32}, Shape{40, 5, 33}, Shape{70, 16, 64}}) {
    expect_nearest_levels(shape);
  }
}

KVSWAP_EVERY_LEVEL(Int4Rows);

}  // namespace
}  // namespace kvswap
