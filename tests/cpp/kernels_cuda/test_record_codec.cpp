#include <cmath>
#include <limits>

#include "kernels/attention_reference.h"
#include "kernels/cuda/kernels.h"
#include "kernels/record_codec.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

/// Records as the CPU encodes and decodes them.
template <typename T>
struct Coded {
  Coded(const RecordShape& shape, const std::vector<T>& source)
      : shape(shape),
        elements(2 * shape.kv_heads * shape.group_tokens * shape.head_dim),
        count(static_cast<int64_t>(source.size()) / elements),
        bytes(source.size()),
        back(source.size()),
        exponents(count * shape.kv_heads * 2) {
    std::vector<const void*> from, encoded;
    std::vector<void*> to, decoded;
    for (int64_t i = 0; i < count; ++i) {
      from.push_back(&source[i * elements]);
      to.push_back(&bytes[i * elements]);
      encoded.push_back(&bytes[i * elements]);
      decoded.push_back(&back[i * elements]);
    }
    encode_records({shape, dtype_of<T>(), from.data(), to.data(), exponents.data(), count}, {});
    decode_records({shape, dtype_of<T>(), encoded.data(), decoded.data(), exponents.data(), count},
                   {});
  }

  RecordShape shape;
  int64_t elements, count;
  std::vector<uint8_t> bytes;
  std::vector<T> back;
  std::vector<int8_t> exponents;  // [count, kv_heads, 2]
};

template <typename T>
void expect_encoded_as_on_cpu(const RecordShape& shape, const std::vector<T>& values) {
  const Coded<T> expected(shape, values);
  in_every_order([&] {
    GuardedBuffer<T> source(values);
    GuardedBuffer<uint8_t> target(static_cast<int64_t>(values.size()));
    GuardedBuffer<int8_t> exponents(static_cast<int64_t>(expected.exponents.size()));
    std::vector<const void*> from;
    std::vector<void*> to;
    for (int64_t i = 0; i < expected.count; ++i) {
      from.push_back(source.data() + i * expected.elements);
      to.push_back(target.data() + i * expected.elements);
    }
    expect_ok(cuda::encode_records(
        {shape, dtype_of<T>(), from.data(), to.data(), exponents.data(), expected.count}, nullptr));
    ASSERT_EQ(exponents.copy(), expected.exponents);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool is_number = !std::isnan(to_float(values[i]));
      const int mask = is_number ? 0xff : 0x7f;
      ASSERT_EQ(target[static_cast<int64_t>(i)] & mask, expected.bytes[i] & mask)
          << to_float(values[i]);
    }
  });
}

template <typename T>
void expect_all_shapes() {
  for (const int64_t head_dim : {1, 3, 64, 72, 256}) {
    for (const int64_t group_tokens : {1, 4, 13}) {
      const RecordShape shape = {2, group_tokens, head_dim, sizeof(T)};
      std::vector<T> values = random_elements<T>(3 * 4 * group_tokens * head_dim, 7);
      // Small ones, so that subnormals occur; a side of zeros; and what is no finite number.
      for (size_t i = 0; i < values.size(); i += 3) {
        values[i] = from_float<T>(to_float(values[i]) * 0x1p-12f);
      }
      std::fill_n(values.begin(), group_tokens * head_dim, from_float<T>(0.0f));
      expect_encoded_as_on_cpu<T>(shape, values);
      values.back() = from_float<T>(std::numeric_limits<float>::quiet_NaN());
      values.front() = from_float<T>(-std::numeric_limits<float>::infinity());
      expect_encoded_as_on_cpu<T>(shape, values);
    }
  }
}

TEST(CudaRecordCodec, EncodesAsTheCpu) {
  expect_all_shapes<float>();
  expect_all_shapes<BFloat16>();
  expect_all_shapes<Float16>();
}

/// Every half as the largest of its side, or beside it.
TEST(CudaRecordCodec, EncodesEveryHalfAsTheCpu) {
  std::vector<Float16> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) values.push_back({static_cast<uint16_t>(bits)});
  expect_encoded_as_on_cpu<Float16>({1, 1, 8, 2}, values);
}

/// The largest and the smallest numbers, whose exponents are at their ends.
TEST(CudaRecordCodec, ExponentsStayWithinWhatTheDtypeHolds) {
  for (const float largest : {std::numeric_limits<float>::max(), 448.0f, 449.0f, 0x1p-120f,
                              std::numeric_limits<float>::denorm_min()}) {
    expect_encoded_as_on_cpu<float>({1, 1, 8, 4}, std::vector<float>(16, largest));
    const BFloat16 rounded = from_float<BFloat16>(std::min(largest, 0x1.fep127f));
    expect_encoded_as_on_cpu<BFloat16>({1, 1, 8, 2}, std::vector<BFloat16>(16, rounded));
  }
}

/// A table of pages in both formats, against the same table decoded: not a bit differs.
template <typename T>
void expect_mixed_pages_count_as_decoded(const AttentionShape& shape, size_t stride) {
  AttentionCase<T> mixed(shape), decoded(shape);
  const RecordShape record = mixed.args().shape;
  const Coded<T> coded(
      record,
      {mixed.elements.begin(), mixed.elements.end() - mixed.elements.size() % mixed.page_elements});
  GuardedBuffer<uint8_t> bytes(coded.bytes);
  const int64_t sides = record.kv_heads * 2;
  std::vector<int8_t> exponents(mixed.pages.size() * sides, kNotFloat8);
  for (size_t i = 0; i < mixed.pages.size(); ++i) {
    if (mixed.pages[i] == nullptr || i % stride != 1 % stride) continue;
    mixed.pages[i] = bytes.data() + i * mixed.page_elements;
    decoded.pages[i] = &coded.back[i * mixed.page_elements];
    std::copy_n(&coded.exponents[i * sides], sides, &exponents[i * sides]);
  }
  in_every_order([&] {
    const auto slots =
        mixed.args().batch * mixed.args().kv_heads() * shape.pages * shape.group_tokens;
    std::vector<float> masses[2];
    for (const bool is_mixed : {true, false}) {
      AttentionCase<T>& attention = is_mixed ? mixed : decoded;
      PagedAttentionArgs args = attention.args();
      if (is_mixed) args.exponents = exponents.data();
      GuardedBuffer<char> scratch(cuda::paged_attention_scratch_bytes(args));
      expect_ok(cuda::paged_attention(args, scratch.data(), nullptr));
      GuardedBuffer<float> mean(slots);
      expect_ok(cuda::attention_mass({.attention = args, .mean = mean.data()}, nullptr));
      masses[is_mixed ? 0 : 1] = mean.copy();
    }
    decoded.expect_matches_reference();
    EXPECT_TRUE(same_bits(mixed.output, decoded.output));
    EXPECT_TRUE(same_bits(mixed.log_sum_exp, decoded.log_sum_exp));
    EXPECT_TRUE(same_bits(masses[0], masses[1]));
  });
}

TEST(CudaRecordCodec, AttentionAndItsMassTakePagesOfBothFormats) {
  for (const AttentionShape& shape :
       {AttentionShape{.kv_heads = 2, .ratio = 4, .head_dim = 64, .pages = 20},  // two splits
        {.batch = 2, .kv_heads = 2, .queries = 3, .head_dim = 72, .pages = 5},
        {.kv_heads = 1, .ratio = 2, .group_tokens = 13, .head_dim = 256, .pages = 4},
        {.kv_heads = 3, .head_dim = 8, .pages = 9, .table_per_head = true},
        {.kv_heads = 1, .ratio = 2, .pages = 7, .softcap = 0.7f, .has_sinks = true}}) {
    for (const size_t stride : {1, 3}) {
      expect_mixed_pages_count_as_decoded<float>(shape, stride);
      expect_mixed_pages_count_as_decoded<BFloat16>(shape, stride);
      expect_mixed_pages_count_as_decoded<Float16>(shape, stride);
    }
  }
}

}  // namespace
}  // namespace kvswap
