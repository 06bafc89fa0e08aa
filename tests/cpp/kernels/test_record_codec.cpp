#include <cmath>
#include <limits>

#include "kernels/attention_mass.h"
#include "kernels/attention_reference.h"
#include "kernels/kernel_test.h"
#include "kernels/paged_attention.h"
#include "kernels/record_codec.h"

namespace kvswap {
namespace {

class RecordCodec : public KernelTest {};

/// Records of one shape, encoded and decoded again.
template <typename T>
struct Coded {
  Coded(const RecordShape& shape, std::vector<T> values) : shape(shape), source(std::move(values)) {
    const int64_t elements = shape.kv_heads * shape.head_elements();
    const int64_t count = static_cast<int64_t>(source.size()) / elements;
    bytes.resize(source.size());
    back.resize(source.size());
    exponents.resize(count * shape.kv_heads * 2);
    std::vector<const void*> sources, encoded;
    std::vector<void*> targets, decoded;
    for (int64_t i = 0; i < count; ++i) {
      sources.push_back(&source[i * elements]);
      targets.push_back(&bytes[i * elements]);
      encoded.push_back(&bytes[i * elements]);
      decoded.push_back(&back[i * elements]);
    }
    encode_records({shape, dtype_of<T>(), sources.data(), targets.data(), exponents.data(), count},
                   {});
    decode_records({shape, dtype_of<T>(), encoded.data(), decoded.data(), exponents.data(), count},
                   {});
  }

  RecordShape shape;
  std::vector<T> source, back;
  std::vector<Float8> bytes;
  std::vector<int8_t> exponents;
};

/// The rule, in double.
template <typename T>
int exponent_of(const T* values, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::fabs(double{to_float(values[i])});
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  constexpr bool is_half = std::is_same_v<T, Float16>;
  int exponent = is_half ? -15 : -117;
  while (exponent < (is_half ? 7 : 119) && largest > std::ldexp(448.0, exponent)) ++exponent;
  return exponent;
}

template <typename T>
void expect_follows_rule(const RecordShape& shape, const std::vector<T>& values) {
  const Coded<T> coded(shape, values);
  int64_t begin = 0;
  for (size_t i = 0; i < coded.exponents.size(); ++i) {
    const int64_t side = shape.group_tokens * (i % 2 == 0 ? shape.head_dim : shape.value_width());
    const T* source = &values[begin];
    const int exponent = exponent_of(source, side);
    ASSERT_EQ(coded.exponents[i], exponent);
    for (int64_t j = 0; j < side; ++j) {
      const float value = to_float(source[j]);
      const float scaled = std::ldexp(value, -exponent);
      const float within = std::isfinite(value) ? std::clamp(scaled, -448.0f, 448.0f) : value;
      const Float8 expected = from_float<Float8>(within);
      ASSERT_EQ(coded.bytes[begin + j].bits, expected.bits) << value;
      const float back = to_float(coded.back[begin + j]);
      if (std::isfinite(value)) {
        ASSERT_EQ(back, std::ldexp(to_float(expected), exponent));
      } else {
        ASSERT_TRUE(std::isnan(back)) << value;
      }
    }
    begin += side;
  }
  ASSERT_EQ(begin, std::ssize(values));
  // Of what was decoded nothing changes any more, whatever exponent it has now.
  const Coded<T> again(shape, coded.back);
  for (size_t i = 0; i < coded.back.size(); ++i) {
    const float once = to_float(coded.back[i]);
    if (std::isnan(once)) {
      ASSERT_TRUE(std::isnan(to_float(again.back[i])));
    } else {
      ASSERT_EQ(to_float(again.back[i]), once);
    }
  }
}

template <typename T>
void expect_all_shapes() {
  for (const int64_t head_dim : {1, 3, 64, 72, 128, 256}) {
    for (const int64_t group_tokens : {1, 4, 13}) {
      for (const int64_t value_dim : {head_dim, (head_dim + 1) / 2}) {
        const RecordShape shape = {2, group_tokens, head_dim, sizeof(T), 2, value_dim};
        std::vector<T> values =
            random_elements<T>(3 * 2 * group_tokens * (head_dim + value_dim), 7);
        // Small ones, so that subnormals occur; and a side of zeros.
        for (size_t i = 0; i < values.size(); i += 3) {
          values[i] = from_float<T>(to_float(values[i]) * 0x1p-12f);
        }
        std::fill_n(values.begin(), group_tokens * head_dim, from_float<T>(0.0f));
        expect_follows_rule<T>(shape, values);
      }
    }
  }
}

TEST_P(RecordCodec, FollowsTheRule) {
  expect_all_shapes<float>();
  expect_all_shapes<BFloat16>();
  expect_all_shapes<Float16>();
}

/// Sides of one value, and of 448 times it: at every power of two that T has.
template <typename T>
void expect_every_magnitude() {
  const RecordShape shape = {1, 1, 4, sizeof(T)};
  for (int power = -150; power <= 128; ++power) {
    for (const float factor : {1.0f, 1.75f, 1.7578125f, 1.9921875f}) {
      const float value = std::ldexp(factor, power);
      const T one = from_float<T>(value);
      if (!std::isfinite(to_float(one))) continue;
      expect_follows_rule<T>(shape, {one, from_float<T>(-value / 448), from_float<T>(value / 3),
                                     one, one, one, one, from_float<T>(-value)});
    }
  }
}

TEST_P(RecordCodec, EveryMagnitude) {
  expect_every_magnitude<float>();
  expect_every_magnitude<BFloat16>();
  expect_every_magnitude<Float16>();
}

TEST_P(RecordCodec, NothingHidesWhatIsNoNumber) {
  const float infinite = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t head_dim : {5, 64}) {
    std::vector<float> values = random_elements<float>(2 * head_dim, 3);
    for (const int64_t at : {int64_t{0}, head_dim - 1}) values[at] = at == 0 ? -infinite : nan;
    values[1] = infinite;
    std::fill_n(values.begin() + head_dim, head_dim, nan);
    expect_follows_rule<float>({1, 1, head_dim, 4}, values);
  }
}

TEST_P(RecordCodec, EveryByteIsDecoded) {
  std::vector<Float8> bytes(256);
  for (int i = 0; i < 256; ++i) bytes[i] = {static_cast<uint8_t>(i)};
  std::vector<float> values(256);
  const void* from = bytes.data();
  void* to = values.data();
  int8_t exponents[] = {-3, 5};
  decode_records({{1, 1, 128, 4}, DType::kFloat32, &from, &to, exponents, 1}, {});
  for (int i = 0; i < 256; ++i) {
    if ((i & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(values[i]));
    } else {
      EXPECT_EQ(values[i], std::ldexp(to_float(bytes[i]), exponents[i / 128])) << i;
    }
  }
}

/// By the log-sum-exp that attention left.
std::vector<float> mass_of(const PagedAttentionArgs& args) {
  std::vector<float> mean(args.batch * args.kv_heads() * args.pages_max * args.shape.group_tokens);
  attention_mass({.attention = args, .mean = mean.data()}, {});
  return mean;
}

/// A table of pages in both formats, against the same table decoded.
template <typename T>
void expect_mixed_pages_count_as_decoded(const AttentionShape& shape, int64_t stride) {
  AttentionCase<T> mixed(shape);
  const RecordShape record = mixed.args().shape;
  const int64_t page_elements = mixed.page_elements;
  Coded<T> coded(record, {mixed.elements.begin(),
                          mixed.elements.end() - mixed.elements.size() % page_elements});
  AttentionCase<T> decoded(shape);
  const int64_t sides = record.kv_heads * 2;
  std::vector<int8_t> exponents(mixed.pages.size() * sides, kNotFloat8);
  for (size_t i = 0; i < mixed.pages.size(); ++i) {
    if (mixed.pages[i] == nullptr || i % stride != 1 % static_cast<size_t>(stride)) continue;
    mixed.pages[i] = &coded.bytes[i * page_elements];
    decoded.pages[i] = &coded.back[i * page_elements];
    std::copy_n(&coded.exponents[i * sides], sides, &exponents[i * sides]);
  }
  PagedAttentionArgs args = mixed.args();
  args.exponents = exponents.data();
  paged_attention(args, {});
  paged_attention(decoded.args(), {});
  decoded.expect_matches_reference();
  for (size_t i = 0; i < mixed.output.size(); ++i) {
    const double expected = to_float(decoded.output[i]);
    ASSERT_NEAR(to_float(mixed.output[i]), expected, tolerance_of<T>() * (1 + std::abs(expected)));
  }
  for (size_t i = 0; i < mixed.log_sum_exp.size(); ++i) {
    if (mixed.log_sum_exp[i] == decoded.log_sum_exp[i]) continue;  // -inf
    ASSERT_NEAR(mixed.log_sum_exp[i], decoded.log_sum_exp[i], 1e-4);
  }
  const std::vector<float> mass = mass_of(args);
  const std::vector<float> expected_mass = mass_of(decoded.args());
  for (size_t i = 0; i < mass.size(); ++i) {
    ASSERT_NEAR(mass[i], expected_mass[i], 1e-6 + 1e-4 * expected_mass[i]);
  }
  // Blocks are cut at the same tokens where all pages are of one format: not a bit differs then.
  if (stride > 1) return;
  for (size_t i = 0; i < mixed.output.size(); ++i) {
    ASSERT_EQ(to_float(mixed.output[i]), to_float(decoded.output[i]));
  }
}

TEST_P(RecordCodec, AttentionAndItsMassTakePagesOfBothFormats) {
  const AttentionShape shapes[] = {
      {.batch = 3, .kv_heads = 2, .ratio = 4, .head_dim = 64, .pages = 40},
      {.batch = 2, .kv_heads = 2, .ratio = 3, .queries = 5, .head_dim = 72, .pages = 9},
      {.kv_heads = 2, .ratio = 2, .group_tokens = 13, .head_dim = 128, .pages = 11},
      {.kv_heads = 4, .ratio = 1, .head_dim = 8, .pages = 25, .table_per_head = true},
      {.kv_heads = 2, .ratio = 2, .queries = 2, .pages = 600},
      {.batch = 2, .kv_heads = 2, .ratio = 2, .head_dim = 192, .pages = 40, .value_dim = 128},
      {.kv_heads = 2, .ratio = 4, .queries = 3, .pages = 30, .softcap = 0.7f, .has_sinks = true}};
  for (const AttentionShape& shape : shapes) {
    for (const int64_t stride : {1, 2, 5}) {
      expect_mixed_pages_count_as_decoded<float>(shape, stride);
      expect_mixed_pages_count_as_decoded<BFloat16>(shape, stride);
      expect_mixed_pages_count_as_decoded<Float16>(shape, stride);
    }
  }
}

KVSWAP_EVERY_LEVEL(RecordCodec);

}  // namespace
}  // namespace kvswap
