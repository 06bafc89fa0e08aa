#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cpu/element.h"
#include "kernels/cpu_features.h"
#include "kernels/types.h"

namespace kvswap {

/// Runs a test once for each SIMD level of this machine.
class KernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(use_simd_level(GetParam())); }
  void TearDown() override { ASSERT_TRUE(use_simd_level(simd_levels().back())); }
};

#define KVSWAP_EVERY_LEVEL(suite)                                               \
  INSTANTIATE_TEST_SUITE_P(EveryLevel, suite, testing::ValuesIn(simd_levels()), \
                           [](const auto& level) { return level.param; })

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, BFloat16>) return DType::kBFloat16;
  if constexpr (std::is_same_v<T, Float16>) return DType::kFloat16;
  return DType::kInt8;
}

/// What a result of type T may be off by, relative to values around 1.
template <typename T>
constexpr double tolerance_of() {
  return std::is_same_v<T, float> ? 2e-5 : std::is_same_v<T, BFloat16> ? 1e-2 : 2e-3;
}

template <typename T>
std::vector<T> random_elements(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> elements(count);
  for (T& element : elements) {
    if constexpr (std::is_same_v<T, int8_t>) {
      element = static_cast<int8_t>(static_cast<int>(generator() % 255) - 127);
    } else {
      element = from_float<T>(normal(generator));
    }
  }
  return elements;
}

}  // namespace kvswap
