// Records that take fewer bytes in the file: what becomes of their tokens.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cluster_run.h"
#include "engine/backend/record_packings.h"
#include "kernels/cpu/element.h"

namespace kvswap {
namespace {

constexpr RecordShape kShape = {.kv_heads = 2, .group_tokens = 5, .head_dim = 24};
constexpr int64_t kRows = 2 * 2 * 5;

/// One record in a dtype.
struct Record {
  DType dtype;
  std::vector<std::byte> bytes;

  Record(DType type, const std::vector<float>& values)
      : dtype(type), bytes(values.size() * dtype_bytes(type)) {
    for (size_t i = 0; i < values.size(); ++i) {
      with_elements(bytes.data(), dtype, [&](auto* element) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        if constexpr (!std::is_same_v<Element, int8_t>) {
          const_cast<Element*>(element)[i] = from_float<Element>(values[i]);
        }
      });
    }
  }
  float at(int64_t i) const {
    float value = 0;
    with_elements(bytes.data(), dtype,
                  [&](const auto* elements) { value = to_float(elements[i]); });
    return value;
  }
};

/// Of a dtype, with V of so many numbers.
class Float8Tokens : public testing::TestWithParam<std::tuple<DType, int64_t>> {
 protected:
  Float8Tokens() : dtype_(std::get<0>(GetParam())), value_dim_(std::get<1>(GetParam())) {
    RecordShape shape = kShape;
    shape.element_bytes = dtype_bytes(dtype_);
    shape.value_dim = value_dim_;
    Settings settings;
    settings.records = "fp8";
    settings.grouping = "clusters";
    packing_ = record_packing(settings, shape, dtype_);
  }
  /// Rows of a KV head are its tokens' K, then their V.
  int64_t width(int64_t row) const {
    return row / kShape.group_tokens % 2 == 0 ? kShape.head_dim : value_dim_;
  }
  int64_t first(int64_t row) const {
    int64_t elements = 0;
    for (int64_t before = 0; before < row; ++before) elements += width(before);
    return elements;
  }
  std::vector<std::byte> packed(const Record& record) {
    std::vector<std::byte> bytes(packing_->payload_bytes());
    packing_->pack(record.bytes.data(), bytes.data());
    return bytes;
  }
  Record rounded(const Record& record) {
    Record found = record;
    packing_->unpack(packed(record).data(), found.bytes.data());
    return found;
  }
  /// Of sizes that differ from row to row, the smallest of a row down to nothing.
  std::vector<float> draw() {
    std::normal_distribution<float> normal;
    std::vector<float> values;
    for (int64_t row = 0; row < kRows; ++row) {
      const float unit = std::ldexp(1.0f, static_cast<int>(random_() % 20) - 12);
      for (int64_t i = 0; i < width(row); ++i) {
        values.push_back(std::ldexp(normal(random_) * unit, -static_cast<int>(random_() % 16)));
      }
    }
    return values;
  }

  const DType dtype_;
  const int64_t value_dim_;
  std::mt19937 random_{1};
  std::unique_ptr<const RecordPacking> packing_;
};

TEST_P(Float8Tokens, AreTheReferencesRows) {
  const Record given(dtype_, draw());
  const Record found = rounded(given);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<float> values;
    for (int64_t i = 0; i < width(row); ++i) values.push_back(given.at(first(row) + i));
    const std::vector<float> expected = rounded_row(values);
    for (int64_t i = 0; i < width(row); ++i) {
      ASSERT_EQ(found.at(first(row) + i), expected[i]) << row << " " << i;
    }
  }
}

TEST_P(Float8Tokens, AreTheSameHoweverOftenTheyArePacked) {
  for (int round = 0; round < 50; ++round) {
    const Record once = rounded(Record(dtype_, draw()));
    ASSERT_EQ(rounded(once).bytes, once.bytes);
    ASSERT_EQ(rounded(rounded(once)).bytes, once.bytes);
  }
}

TEST_P(Float8Tokens, AreTheSameBesideAnyOthers) {
  std::vector<float> values = draw();
  const Record before = rounded(Record(dtype_, values));
  const float kinds[] = {0.0f, 6e4f, std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN()};
  for (const float other : kinds) {
    for (int64_t i = 0; i < width(7); ++i) values[first(7) + i] = other;
    const Record found = rounded(Record(dtype_, values));
    for (int64_t i = 0; i < first(kRows); ++i) {
      if (i >= first(7) && i < first(8)) continue;
      ASSERT_EQ(found.at(i), before.at(i)) << i;
    }
    const float becomes = found.at(first(7));
    EXPECT_EQ(std::isnan(becomes), !std::isfinite(other));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Float8Tokens,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kBFloat16,
                                                          DType::kFloat16),
                                          testing::Values(kShape.head_dim, 10)));

TEST(RecordPackings, AreOfRecordsThatStandOtherwiseInTheFile) {
  RecordShape shape = kShape;
  shape.element_bytes = 4;
  Settings settings;
  EXPECT_EQ(record_packing(settings, shape, DType::kFloat32), nullptr);
  settings.grouping = "clusters";
  EXPECT_EQ(record_packing(settings, shape, DType::kFloat32), nullptr);
  settings.records = "fp8";
  EXPECT_EQ(record_packing(settings, shape, DType::kFloat32)->payload_bytes(),
            kRows * kShape.head_dim + kRows);
  settings.grouping = "runs";
  EXPECT_EQ(record_packing(settings, shape, DType::kFloat32), nullptr) << "pages are e4m3 too";
}

}  // namespace
}  // namespace kvswap
