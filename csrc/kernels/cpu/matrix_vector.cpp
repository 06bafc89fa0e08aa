#include "kernels/matrix_vector.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matrix_vector.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/targets.h"

// Must come after targets.h.
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// Rows row..row + kRows: as many streams from memory at a time.
template <typename T, int kRows>
void multiply_rows(const MatrixVectorArgs& args, int64_t row) {
  const T* matrix = static_cast<const T*>(args.matrix) + row * args.columns;
  const T* vector = static_cast<const T*>(args.vector);
  Floats sums[kRows];
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) sums[r] = zeros();
  int64_t column = 0;
  for (; column + kLanes <= args.columns; column += kLanes) {
    const Floats part = load(vector + column);
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r] = multiply_add(load(matrix + r * args.columns + column), part, sums[r]);
    }
  }
  const int64_t left = args.columns - column;
  for (int r = 0; left > 0 && r < kRows; ++r) {
    const Floats rest = load_some(matrix + r * args.columns + column, left);
    sums[r] = multiply_add(rest, load_some(vector + column, left), sums[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    const T* bias = static_cast<const T*>(args.bias);
    const float total = sum(sums[r]) + (bias == nullptr ? 0.0f : to_float(bias[row + r]));
    static_cast<T*>(args.output)[row + r] = from_float<T>(total);
  }
}

void multiply_matrix(const MatrixVectorArgs& args, int64_t begin, int64_t end) {
  constexpr int kRows = 4;
  with_float_type(args.dtype, [&]<typename T>() {
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) multiply_rows<T, kRows>(args, row);
    for (; row < end; ++row) multiply_rows<T, 1>(args, row);
  });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(multiply_matrix);

void matrix_vector(const MatrixVectorArgs& args, const Execution& execution) {
  constexpr int64_t kRowsAtLeast = 64;  // of a thread
  run_parallel(execution, args.rows, kRowsAtLeast, [&](int64_t begin, int64_t end) {
    KVSWAP_DISPATCH(multiply_matrix)(args, begin, end);
  });
}

}  // namespace kvswap
#endif  // HWY_ONCE
