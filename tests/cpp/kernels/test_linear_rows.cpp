#include <cmath>

#include "kernels/kernel_test.h"
#include "kernels/linear_rows.h"

namespace kvswap {
namespace {

class LinearRows : public KernelTest {};

template <typename T>
struct Layer {
  Layer(int64_t outputs, int64_t inputs, int64_t rows)
      : outputs(outputs),
        inputs(inputs),
        rows(rows),
        weight(random_elements<T>(outputs * inputs, 1)),
        input(random_elements<T>(rows * inputs, 2)),
        bias(random_elements<T>(outputs, 3)),
        output(rows * outputs + 1, from_float<T>(-7.0f)) {}

  void run(bool has_bias, const Execution& execution = {}) {
    linear_rows({.weight = weight.data(),
                 .bias = has_bias ? bias.data() : nullptr,
                 .input = input.data(),
                 .output = output.data(),
                 .outputs = outputs,
                 .inputs = inputs,
                 .rows = rows,
                 .dtype = dtype_of<T>()},
                execution);
  }

  float output_of(int64_t row, int64_t o) const { return to_float(output[row * outputs + o]); }

  void expect_sums(bool has_bias) const {
    const double size = std::sqrt(static_cast<double>(inputs)) + 1;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        double expected = has_bias ? to_float(bias[o]) : 0.0;
        for (int64_t i = 0; i < inputs; ++i) {
          expected += double{to_float(weight[o * inputs + i])} * to_float(input[r * inputs + i]);
        }
        EXPECT_NEAR(output_of(r, o), expected, tolerance_of<T>() * size) << r << ", " << o;
      }
    }
    EXPECT_EQ(to_float(output.back()), -7.0f) << "written beyond the last row";
  }

  int64_t outputs, inputs, rows;
  std::vector<T> weight, input, bias, output;
};

template <typename T>
void expect_products() {
  for (const int64_t outputs : {1, 3, 4, 130}) {
    for (const int64_t inputs : {1, 7, 16, 33, 64, 256}) {
      for (const int64_t rows : {1, 2, 3, 4, 7, 9}) {
        for (const bool has_bias : {false, true}) {
          Layer<T> layer(outputs, inputs, rows);
          layer.run(has_bias);
          layer.expect_sums(has_bias);
        }
      }
    }
  }
}

TEST_P(LinearRows, AreSumsOfProducts) {
  expect_products<float>();
  expect_products<BFloat16>();
  expect_products<Float16>();
}

template <typename T>
void expect_rows_alone() {
  const ParallelFor by_three = [](int64_t count, int64_t, const auto& body) {
    for (int64_t begin = 0; begin < count; begin += 3) body(begin, std::min(count, begin + 3));
  };
  Layer<T> together(130, 77, 7);
  together.run(true);
  Layer<T> split(130, 77, 7);
  split.run(true, {.parallel = &by_three});
  for (int64_t r = 0; r < 7; ++r) {
    Layer<T> alone(130, 77, 1);
    std::copy_n(together.input.begin() + r * 77, 77, alone.input.begin());
    alone.run(true);
    for (int64_t o = 0; o < 130; ++o) {
      EXPECT_EQ(alone.output_of(0, o), together.output_of(r, o)) << r << ", " << o;
      EXPECT_EQ(split.output_of(r, o), together.output_of(r, o)) << r << ", " << o;
    }
  }
}

TEST_P(LinearRows, DependNeitherOnRowsBesideThemNorOnHowOutputsAreSplit) {
  expect_rows_alone<float>();
  expect_rows_alone<BFloat16>();
  expect_rows_alone<Float16>();
}

template <typename T>
void expect_not_a_number_to_stay_alone() {
  Layer<T> layer(8, 40, 3);
  layer.weight[2 * 40 + 39] = from_float<T>(NAN);
  layer.input[1 * 40 + 39] = from_float<T>(NAN);
  layer.run(false);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t o = 0; o < 8; ++o) {
      EXPECT_EQ(std::isnan(layer.output_of(r, o)), r == 1 || o == 2) << r << ", " << o;
    }
  }
}

TEST_P(LinearRows, WhatIsNoNumberReachesItsOutputAndItsRowAlone) {
  expect_not_a_number_to_stay_alone<float>();
  expect_not_a_number_to_stay_alone<BFloat16>();
  expect_not_a_number_to_stay_alone<Float16>();
}

KVSWAP_EVERY_LEVEL(LinearRows);

}  // namespace
}  // namespace kvswap
