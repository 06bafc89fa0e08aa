#include <bit>
#include <cmath>
#include <limits>

#include "kernels/int4_records.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

class Int4Records : public KernelTest {};

template <typename T>
Int4Shape shape_of(int64_t heads, int64_t tokens, int64_t head_dim, int64_t value_dim = 0) {
  const RecordShape record = {heads, tokens, head_dim, int64_t{sizeof(T)}, 2, value_dim};
  return {record, dtype_of<T>()};
}

/// One record, encoded and decoded again.
template <typename T>
struct Coded {
  Coded(const Int4Shape& shape, const std::vector<T>& record)
      : bytes(shape.payload_bytes()), back(record.size()) {
    encode_int4_record(shape, reinterpret_cast<const std::byte*>(record.data()), bytes.data());
    decode_int4_record(shape, bytes.data(), reinterpret_cast<std::byte*>(back.data()));
  }

  std::vector<std::byte> bytes;
  std::vector<T> back;
};

/// A row of one token by the definition: each block times a Hadamard matrix, whose signs are those
/// of the bits that two numbers have in common.
std::vector<double> rotated(const std::vector<double>& row, int64_t block) {
  std::vector<double> found(row.size());
  for (size_t i = 0; i < row.size(); ++i) {
    const size_t begin = i / block * block;
    for (int64_t j = 0; j < block; ++j) {
      const bool is_odd = std::popcount((i - begin) & static_cast<size_t>(j)) % 2 == 1;
      found[i] += (is_odd ? -1 : 1) * row[begin + j] / std::sqrt(static_cast<double>(block));
    }
  }
  return found;
}

template <typename T>
std::vector<double> row_of(const std::vector<T>& record, int64_t first, int64_t width) {
  std::vector<double> values(width);
  for (int64_t d = 0; d < width; ++d) values[d] = to_float(record[first + d]);
  return values;
}

double largest_of(const std::vector<double>& row, int64_t begin, int64_t block) {
  double largest = 0;
  for (int64_t i = 0; i < block; ++i) largest = std::max(largest, std::fabs(row[begin + i]));
  return largest;
}

/// A step is at most 1.125 * largest / 7.5 of what is coded: a level is half a step off, and of K
/// the differences to a mean that is half a step off are coded.
template <typename T>
void expect_near(const Int4Shape& shape, const std::vector<T>& record) {
  const Coded<T> coded(shape, record);
  constexpr double kHalfStep = 0.5 * 1.125 / 7.5;
  const int64_t tokens = shape.record.group_tokens;
  for (int64_t side = 0; side < 2 * shape.record.kv_heads; ++side) {
    const bool is_key = side % 2 == 0;
    const int64_t width = is_key ? shape.record.head_dim : shape.record.value_width();
    const int64_t block = width % 64 == 0 ? 64 : width % 32 == 0 ? 32 : 16;
    const int64_t first = side / 2 * tokens * (shape.record.head_dim + shape.record.value_width()) +
                          (is_key ? 0 : tokens * shape.record.head_dim);
    std::vector<double> mean(width);
    for (int64_t t = 0; is_key && t < tokens; ++t) {
      const std::vector<double> row = rotated(row_of(record, first + t * width, width), block);
      for (int64_t d = 0; d < width; ++d) mean[d] += row[d] / static_cast<double>(tokens);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> row = rotated(row_of(record, first + t * width, width), block);
      const std::vector<double> back = rotated(row_of(coded.back, first + t * width, width), block);
      for (int64_t begin = 0; begin < width; begin += block) {
        std::vector<double> difference = row;
        for (int64_t d = 0; d < width; ++d) difference[d] -= mean[d];
        const double least = kHalfStep * largest_of(mean, begin, block);
        const double most = kHalfStep * (largest_of(difference, begin, block) + least) +
                            tolerance_of<T>() * largest_of(row, begin, block) + 1e-5;
        for (int64_t i = begin; i < begin + block; ++i) {
          ASSERT_NEAR(row[i], back[i], most) << "token " << t << " of side " << side;
        }
      }
    }
  }
}

TEST_P(Int4Records, KeepsWhatFourBitsCanSay) {
  for (const int64_t head_dim : {16, 32, 48, 64, 80, 96, 112, 128, 192, 256}) {
    for (const int64_t tokens : {1, 3, 4, 8, 16}) {
      const int64_t count = 2 * 2 * tokens * head_dim;
      const auto seed = static_cast<uint32_t>(head_dim + tokens);
      expect_near(shape_of<float>(2, tokens, head_dim), random_elements<float>(count, seed));
      expect_near(shape_of<BFloat16>(2, tokens, head_dim), random_elements<BFloat16>(count, seed));
      expect_near(shape_of<Float16>(2, tokens, head_dim), random_elements<Float16>(count, seed));
    }
  }
}

TEST_P(Int4Records, ValuesNarrowerThanKeys) {
  for (const auto& [head_dim, value_dim] : {std::pair{192, 128}, {64, 48}, {96, 16}, {48, 32}}) {
    const int64_t count = 2 * 8 * (head_dim + value_dim);
    const auto seed = static_cast<uint32_t>(head_dim);
    expect_near(shape_of<float>(2, 8, head_dim, value_dim), random_elements<float>(count, seed));
    expect_near(shape_of<BFloat16>(2, 8, head_dim, value_dim),
                random_elements<BFloat16>(count, seed));
  }
}

/// What all keys of a record have in common costs their differences nothing.
TEST_P(Int4Records, ChannelsFarFromZeroKeepTheirDifferences) {
  const Int4Shape shape = shape_of<float>(1, 8, 64);
  std::vector<float> record = random_elements<float>(2 * 8 * 64, 5);
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t d = 0; d < 64; ++d) record[t * 64 + d] = 0.1f * record[t * 64 + d];
    record[t * 64 + 3] += 20.0f;
  }
  const Coded<float> coded(shape, record);
  double error = 0;
  for (int64_t i = 0; i < 8 * 64; ++i) error += std::pow(record[i] - coded.back[i], 2);
  // 20 spread over the block is 2.5 everywhere; a step of it would be 0.33, of the rest 0.05.
  EXPECT_LT(std::sqrt(error / (8 * 64)), 0.05);
}

TEST_P(Int4Records, ZeroStaysZero) {
  const Int4Shape shape = shape_of<BFloat16>(2, 4, 128);
  const Coded<BFloat16> coded(shape, std::vector<BFloat16>(2 * 2 * 4 * 128, BFloat16{0}));
  for (const BFloat16 value : coded.back) ASSERT_EQ(to_float(value), 0.0f);
}

TEST_P(Int4Records, ATokenThatIsNotFiniteAlone) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Int4Shape shape = shape_of<float>(1, 4, 128);
    std::vector<float> record = random_elements<float>(2 * 4 * 128, 9);
    record[128 + 70] = bad;        // K, token 1, its second block
    record[(4 + 2) * 128] = -bad;  // V, token 2, its first one
    const Coded<float> coded(shape, record);
    for (int64_t i = 0; i < std::ssize(record); ++i) {
      const int64_t row = i / 128, half = i % 128 / 64;
      const bool is_lost = (row == 1 && half == 1) || (row == 6 && half == 0);
      ASSERT_EQ(std::isnan(coded.back[i]), is_lost) << i;
      if (!is_lost) {
        ASSERT_NEAR(coded.back[i], record[i], 2.0f);
      }
    }
  }
}

/// Beyond the scales there are: the outer levels, or the least scale.
TEST_P(Int4Records, SizesThatNoScaleHas) {
  const Int4Shape shape = shape_of<float>(1, 1, 16);
  for (const float size : {1e-12f, 1e30f}) {
    std::vector<float> record(2 * 16);
    record[16] = size;  // V
    const Coded<float> coded(shape, record);
    const float most = std::max(std::ldexp(1.0f, -19), size);
    for (int64_t i = 0; i < 16; ++i) {
      ASSERT_TRUE(std::isfinite(coded.back[16 + i]));
      ASSERT_LE(std::fabs(coded.back[16 + i]), 4 * most);
    }
  }
}

TEST(Int4RecordBytes, AreTheSameOnEveryLevel) {
  for (const int64_t head_dim : {64, 96, 112, 128}) {
    const Int4Shape shape = shape_of<BFloat16>(3, 8, head_dim);
    const auto record = random_elements<BFloat16>(3 * 2 * 8 * head_dim, 77);
    std::vector<std::byte> bytes;
    for (const std::string& level : simd_levels()) {
      ASSERT_TRUE(use_simd_level(level));
      const Coded<BFloat16> coded(shape, record);
      if (bytes.empty()) bytes = coded.bytes;
      EXPECT_EQ(coded.bytes, bytes) << level;
    }
    ASSERT_TRUE(use_simd_level(simd_levels().back()));
  }
}

TEST(Int4RecordBytes, AreAQuarterAndTheirScales) {
  // Of 8 tokens: a row is 2 + 64 bytes for 256 of bf16; K has the mean's row beside its own.
  EXPECT_EQ(shape_of<BFloat16>(8, 8, 128).payload_bytes(), 8 * 17 * 66);
  EXPECT_EQ(shape_of<BFloat16>(3, 4, 64).payload_bytes(), 3 * 9 * 33);
  EXPECT_EQ(shape_of<BFloat16>(4, 8, 192, 128).payload_bytes(), 4 * (9 * 99 + 8 * 66));
}

KVSWAP_EVERY_LEVEL(Int4Records);

}  // namespace
}  // namespace kvswap
