#include <cmath>

#include "kernels/kernel_test.h"
#include "kernels/matrix_vector.h"

namespace kvswap {
namespace {

class MatrixVector : public KernelTest {};

template <typename T>
struct Product {
  Product(int64_t rows, int64_t columns)
      : rows(rows),
        columns(columns),
        matrix(random_elements<T>(rows * columns, 1)),
        vector(random_elements<T>(columns, 2)),
        bias(random_elements<T>(rows, 3)),
        output(rows + 1, from_float<T>(-7.0f)) {}

  void run(bool has_bias, const Execution& execution = {}) {
    matrix_vector({.matrix = matrix.data(),
                   .vector = vector.data(),
                   .bias = has_bias ? bias.data() : nullptr,
                   .output = output.data(),
                   .rows = rows,
                   .columns = columns,
                   .dtype = dtype_of<T>()},
                  execution);
  }

  void expect_sums(bool has_bias) const {
    for (int64_t r = 0; r < rows; ++r) {
      double expected = has_bias ? to_float(bias[r]) : 0.0;
      for (int64_t c = 0; c < columns; ++c) {
        expected += double{to_float(matrix[r * columns + c])} * to_float(vector[c]);
      }
      const double size = std::sqrt(static_cast<double>(columns)) + 1;
      EXPECT_NEAR(to_float(output[r]), expected, tolerance_of<T>() * size) << "row " << r;
    }
    EXPECT_EQ(to_float(output[rows]), -7.0f) << "written beyond the last row";
  }

  int64_t rows, columns;
  std::vector<T> matrix, vector, bias, output;
};

template <typename T>
void expect_products() {
  for (const int64_t rows : {1, 3, 4, 130}) {
    for (const int64_t columns : {1, 7, 16, 33, 256}) {
      for (const bool has_bias : {false, true}) {
        Product<T> product(rows, columns);
        product.run(has_bias);
        product.expect_sums(has_bias);
      }
    }
  }
}

TEST_P(MatrixVector, IsTheSumOfProducts) {
  expect_products<float>();
  expect_products<BFloat16>();
  expect_products<Float16>();
}

TEST_P(MatrixVector, HowRowsAreSplitChangesNoBit) {
  const ParallelFor by_three = [](int64_t count, int64_t, const auto& body) {
    for (int64_t begin = 0; begin < count; begin += 3) body(begin, std::min(count, begin + 3));
  };
  Product<float> serial(130, 77);
  Product<float> split(130, 77);
  serial.run(true);
  split.run(true, {.parallel = &by_three});
  EXPECT_EQ(serial.output, split.output);
}

TEST_P(MatrixVector, WhatIsNoNumberReachesItsRowAlone) {
  Product<BFloat16> product(8, 40);
  product.matrix[2 * 40 + 39] = from_float<BFloat16>(NAN);
  product.run(false);
  for (int64_t r = 0; r < 8; ++r) {
    EXPECT_EQ(std::isnan(to_float(product.output[r])), r == 2) << "row " << r;
  }
}

KVSWAP_EVERY_LEVEL(MatrixVector);

}  // namespace
}  // namespace kvswap
