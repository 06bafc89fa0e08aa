#include <cmath>

#include "kernels/cuda/kernels.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

template <typename T>
void expect_fp8_as_on_cpu(int64_t rows, int64_t head_dim) {
  std::vector<T> values = random_elements<T>(rows * head_dim, 3);
  for (int64_t d = 0; d < head_dim && rows > 1; ++d) values[head_dim + d] = from_float<T>(0.0f);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = from_float<T>(to_float(values[i]) * std::exp2(static_cast<float>(i % 17) - 12));
  }
  std::vector<uint8_t> expected(values.size());
  std::vector<float> expected_scales(rows);
  std::vector<T> expected_back(values.size());
  Fp8Args cpu{.source = values.data(),
              .target = expected.data(),
              .scales = expected_scales.data(),
              .rows = rows,
              .head_dim = head_dim,
              .dtype = dtype_of<T>()};
  fp8_quantize(cpu, {});
  cpu.source = expected.data();
  cpu.target = expected_back.data();
  fp8_dequantize(cpu, {});
  in_every_order([&] {
    GuardedBuffer<T> source(values);
    GuardedBuffer<uint8_t> target(rows * head_dim);
    GuardedBuffer<float> scales(rows);
    Fp8Args args = cpu;
    args.source = source.data();
    args.target = target.data();
    args.scales = scales.data();
    expect_ok(cuda::fp8_quantize(args, nullptr));
    EXPECT_EQ(scales.copy(), expected_scales);
    EXPECT_EQ(target.copy(), expected) << rows << " x " << head_dim;
    GuardedBuffer<T> back(rows * head_dim);
    args.source = target.data();
    args.target = back.data();
    expect_ok(cuda::fp8_dequantize(args, nullptr));
    EXPECT_TRUE(same_bits(back.copy(), expected_back)) << rows << " x " << head_dim;
  });
}

TEST(CudaFp8, AsOnCpu) {
  for (const int64_t head_dim : {1, 7, 64, 72, 96, 128, 256, 264}) {
    for (const int64_t rows : {0, 1, 3, 37, 300}) {
      expect_fp8_as_on_cpu<float>(rows, head_dim);
      expect_fp8_as_on_cpu<BFloat16>(rows, head_dim);
      expect_fp8_as_on_cpu<Float16>(rows, head_dim);
    }
  }
}

/// All finite halves against 448, so that the scale is 1 and only rounding is left.
TEST(CudaFp8, RoundsEveryHalf) {
  std::vector<Float16> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 value{static_cast<uint16_t>(bits)};
    if (!(std::abs(to_float(value)) <= 448.0f)) continue;
    values.push_back(value);
    for (int i = 0; i < 7; ++i) values.push_back(from_float<Float16>(448.0f));
  }
  const auto rows = static_cast<int64_t>(values.size()) / 8;
  std::vector<uint8_t> target(values.size());
  std::vector<float> scales(rows);
  emulated::order = emulated::Order::kRising;
  expect_ok(cuda::fp8_quantize({.source = values.data(),
                                .target = target.data(),
                                .scales = scales.data(),
                                .rows = rows,
                                .head_dim = 8,
                                .dtype = DType::kFloat16},
                               nullptr));
  for (int64_t row = 0; row < rows; ++row) {
    ASSERT_EQ(scales[row], 1.0f);
    ASSERT_EQ(target[row * 8], from_float<Float8>(to_float(values[row * 8])).bits);
  }
}

template <typename T>
void expect_merge_as_on_cpu(int64_t rows, int64_t head_dim) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const std::vector<T> output = random_elements<T>(rows * head_dim, 1);
  const std::vector<T> other = random_elements<T>(rows * head_dim, 2);
  std::vector<float> sums = random_elements<float>(rows, 3);
  std::vector<float> other_sums = random_elements<float>(rows, 4);
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 5 == 1) sums[row] = kNever;
    if (row % 7 < 2) other_sums[row] = kNever;
  }
  std::vector<T> expected = output;
  std::vector<float> expected_sums = sums;
  MergeAttentionArgs args{.output = expected.data(),
                          .log_sum_exp = expected_sums.data(),
                          .other_output = other.data(),
                          .other_log_sum_exp = other_sums.data(),
                          .rows = rows,
                          .head_dim = head_dim,
                          .dtype = dtype_of<T>(),
                          .other_dtype = dtype_of<T>()};
  merge_attention(args, {});
  in_every_order([&] {
    GuardedBuffer<T> merged(output), others(other);
    GuardedBuffer<float> merged_sums(sums), others_sums(other_sums);
    MergeAttentionArgs on_device = args;
    on_device.output = merged.data();
    on_device.log_sum_exp = merged_sums.data();
    on_device.other_output = others.data();
    on_device.other_log_sum_exp = others_sums.data();
    expect_ok(cuda::merge_attention(on_device, nullptr));
    for (int64_t i = 0; i < rows * head_dim; ++i) {
      ASSERT_NEAR(to_float(merged[i]), to_float(expected[i]), tolerance_of<T>() * 4);
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (expected_sums[row] == kNever) {
        ASSERT_EQ(merged_sums[row], kNever);
      } else {
        ASSERT_NEAR(merged_sums[row], expected_sums[row], 1e-5);
      }
    }
  });
}

TEST(CudaMergeAttention, AsOnCpu) {
  for (const int64_t head_dim : {5, 64, 96, 128, 256, 512}) {
    for (const int64_t rows : {0, 1, 70}) {
      expect_merge_as_on_cpu<float>(rows, head_dim);
      expect_merge_as_on_cpu<BFloat16>(rows, head_dim);
      expect_merge_as_on_cpu<Float16>(rows, head_dim);
    }
  }
}

}  // namespace
}  // namespace kvswap
