#include <cmath>
#include <limits>

#include "kernels/kernel_test.h"
#include "kernels/merge_attention.h"

namespace kvswap {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

class MergeAttention : public KernelTest {};

template <typename T, typename Other>
void expect_matches_reference(int64_t rows, int64_t head_dim) {
  auto output = random_elements<T>(rows * head_dim, 1);
  const auto other = random_elements<Other>(rows * head_dim, 2);
  auto log_sum_exp = random_elements<float>(rows, 3);
  auto other_log_sum_exp = random_elements<float>(rows, 4);
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 5 == 1) log_sum_exp[row] = kNothing;
    if (row % 5 == 2) other_log_sum_exp[row] = kNothing;
    if (row % 5 == 3) log_sum_exp[row] = other_log_sum_exp[row] = kNothing;
  }
  const auto output_before = output;
  const auto log_sum_exp_before = log_sum_exp;
  merge_attention({.output = output.data(),
                   .log_sum_exp = log_sum_exp.data(),
                   .other_output = other.data(),
                   .other_log_sum_exp = other_log_sum_exp.data(),
                   .rows = rows,
                   .head_dim = head_dim,
                   .dtype = dtype_of<T>(),
                   .other_dtype = dtype_of<Other>()},
                  {});
  for (int64_t row = 0; row < rows; ++row) {
    const double weight = std::exp(double{log_sum_exp_before[row]});
    const double other_weight = std::exp(double{other_log_sum_exp[row]});
    const double total = weight + other_weight;
    if (total > 0) {
      EXPECT_NEAR(log_sum_exp[row], std::log(total), 1e-5);
    } else {
      EXPECT_EQ(log_sum_exp[row], kNothing);
    }
    for (int64_t i = row * head_dim; i < (row + 1) * head_dim; ++i) {
      const double sum = weight * to_float(output_before[i]) + other_weight * to_float(other[i]);
      ASSERT_NEAR(to_float(output[i]), total > 0 ? sum / total : 0.0, 2 * tolerance_of<T>()) << row;
    }
  }
}

TEST_P(MergeAttention, MatchesReference) {
  for (const int64_t head_dim : {1, 64, 72, 128}) {
    for (const int64_t rows : {0, 1, 17, 200}) {
      expect_matches_reference<float, float>(rows, head_dim);
      expect_matches_reference<float, BFloat16>(rows, head_dim);
      expect_matches_reference<float, Float16>(rows, head_dim);
      expect_matches_reference<BFloat16, BFloat16>(rows, head_dim);
      expect_matches_reference<Float16, Float16>(rows, head_dim);
    }
  }
}

KVSWAP_EVERY_LEVEL(MergeAttention);

}  // namespace
}  // namespace kvswap
