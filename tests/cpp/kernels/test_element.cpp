#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/element.h"

namespace kvswap {
namespace {

TEST(Element, HalvesSurviveTheWayThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    EXPECT_TRUE(std::isnan(to_float(half)) || from_float<Float16>(to_float(half)).bits == bits);
    EXPECT_TRUE(std::isnan(to_float(brain)) || from_float<BFloat16>(to_float(brain)).bits == bits);
  }
}

TEST(Element, Float8SurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const Float8 value{static_cast<uint8_t>(bits)};
    EXPECT_TRUE((bits & 0x7f) == 0x7f || from_float<Float8>(to_float(value)).bits == bits);
  }
  EXPECT_TRUE(std::isnan(to_float(Float8{0x7f})));
}

TEST(Element, KnownValues) {
  EXPECT_EQ(to_float(Float16{0x3c00}), 1.0f);
  EXPECT_EQ(to_float(Float16{0x0001}), 0x1p-24f);
  EXPECT_TRUE(std::isinf(to_float(Float16{0x7c00})));
  EXPECT_TRUE(std::isnan(to_float(Float16{0x7e00})));
  EXPECT_EQ(to_float(Float8{0x7e}), 448.0f);
  EXPECT_EQ(to_float(Float8{0x01}), 0x1p-9f);
}

TEST(Element, RoundsToNearestTiesToEven) {
  EXPECT_EQ(from_float<BFloat16>(1.0f + 0x1p-8f).bits, 0x3f80);
  EXPECT_EQ(from_float<BFloat16>(1.0f + 3 * 0x1p-8f).bits, 0x3f82);
  EXPECT_EQ(from_float<Float16>(1.0f + 0x1p-11f).bits, 0x3c00);
  EXPECT_EQ(from_float<Float16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Float16>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(from_float<Float8>(17.0f).bits, from_float<Float8>(16.0f).bits);
  EXPECT_EQ(from_float<Float8>(464.0f).bits, 0x7e);
}

}  // namespace
}  // namespace kvswap
