#include <cmath>

#include "kernels/fp8.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

class Fp8 : public KernelTest {};

template <typename T>
void expect_rounds_as_scalar(int64_t rows, int64_t head_dim) {
  auto source = random_elements<T>(rows * head_dim, 1);
  for (size_t i = 0; i < source.size(); i += 3) {  // small ones, so that subnormals occur
    source[i] = from_float<T>(to_float(source[i]) * 0x1p-10f);
  }
  std::fill_n(source.begin(), rows > 1 ? head_dim : 0, from_float<T>(0.0f));
  std::vector<Float8> quantized(rows * head_dim);
  std::vector<float> scales(rows, -1.0f);
  fp8_quantize({.source = source.data(),
                .target = quantized.data(),
                .scales = scales.data(),
                .rows = rows,
                .head_dim = head_dim,
                .dtype = dtype_of<T>()},
               {});
  std::vector<T> back(rows * head_dim);
  fp8_dequantize({.source = quantized.data(),
                  .target = back.data(),
                  .scales = scales.data(),
                  .rows = rows,
                  .head_dim = head_dim,
                  .dtype = dtype_of<T>()},
                 {});
  for (int64_t row = 0; row < rows; ++row) {
    float largest = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      largest = std::max(largest, std::fabs(to_float(source[row * head_dim + d])));
    }
    EXPECT_EQ(scales[row], largest > 0 ? largest / 448.0f : 1.0f);
    for (int64_t i = row * head_dim; i < (row + 1) * head_dim; ++i) {
      const Float8 expected = from_float<Float8>(to_float(source[i]) / scales[row]);
      ASSERT_EQ(quantized[i].bits, expected.bits) << i;
      ASSERT_EQ(to_float(back[i]), to_float(from_float<T>(to_float(expected) * scales[row]))) << i;
    }
  }
}

TEST_P(Fp8, RoundsAsScalar) {
  for (const int64_t head_dim : {1, 64, 72, 80, 128}) {
    for (const int64_t rows : {0, 1, 33}) {
      expect_rounds_as_scalar<float>(rows, head_dim);
      expect_rounds_as_scalar<BFloat16>(rows, head_dim);
      expect_rounds_as_scalar<Float16>(rows, head_dim);
    }
  }
}

TEST_P(Fp8, EveryByteIsDequantized) {
  std::vector<Float8> bytes(256);
  for (int i = 0; i < 256; ++i) bytes[i] = {static_cast<uint8_t>(i)};
  float scale = 0.5f;
  std::vector<float> values(256);
  fp8_dequantize({.source = bytes.data(),
                  .target = values.data(),
                  .scales = &scale,
                  .rows = 1,
                  .head_dim = 256},
                 {});
  for (int i = 0; i < 256; ++i) {
    if ((i & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(values[i]));
    } else {
      EXPECT_EQ(values[i], 0.5f * to_float(bytes[i])) << i;
    }
  }
}

KVSWAP_EVERY_LEVEL(Fp8);

}  // namespace
}  // namespace kvswap
