#include "kernels/fp8.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr float kFloat8Max = 448.0f;

/// The larger one; `a` is left out where it is NaN.
inline Floats larger(Floats a, Floats b) { return where_greater(a, b, a, b); }

/// No larger than what e4m3 has, which a quotient of tiny numbers can be; NaN stays.
inline Floats representable(Floats a) {
  const Floats most = fill(kFloat8Max), least = fill(-kFloat8Max);
  return where_greater(a, most, most, where_greater(least, a, least, a));
}

template <typename T>
float largest_magnitude(const T* row, int64_t size) {
  Floats largest_so_far = zeros();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    largest_so_far = larger(magnitude(load(row + i)), largest_so_far);
  }
  if (i < size) {
    largest_so_far = larger(magnitude(load_some(row + i, size - i)), largest_so_far);
  }
  return largest(largest_so_far);
}

template <typename T>
void quantize_typed(const Fp8Args& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* source = static_cast<const T*>(args.source) + row * args.head_dim;
    Float8* target = static_cast<Float8*>(args.target) + row * args.head_dim;
    const float step = largest_magnitude(source, args.head_dim) / kFloat8Max;
    const float scale = step > 0.0f ? step : 1.0f;
    args.scales[row] = scale;
    int64_t i = 0;
    for (; i + kLanes <= args.head_dim; i += kLanes) {
      store(representable(divide(load(source + i), fill(scale))), target + i);
    }
    if (i < args.head_dim) {
      const int64_t rest = args.head_dim - i;
      store_some(representable(divide(load_some(source + i, rest), fill(scale))), target + i, rest);
    }
  }
}

template <typename T>
void dequantize_typed(const Fp8Args& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Float8* source = static_cast<const Float8*>(args.source) + row * args.head_dim;
    T* target = static_cast<T*>(args.target) + row * args.head_dim;
    const Floats scale = fill(args.scales[row]);
    int64_t i = 0;
    for (; i + kLanes <= args.head_dim; i += kLanes) {
      store(multiply(load(source + i), scale), target + i);
    }
    if (i < args.head_dim) {
      const int64_t rest = args.head_dim - i;
      store_some(multiply(load_some(source + i, rest), scale), target + i, rest);
    }
  }
}

void quantize_rows(const Fp8Args& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { quantize_typed<T>(args, begin, end); });
}

void dequantize_rows(const Fp8Args& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { dequantize_typed<T>(args, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(quantize_rows);
KVSWAP_EXPORT(dequantize_rows);

inline constexpr int64_t kRowsPerPiece = 256;

void fp8_quantize(const Fp8Args& args, const Execution& execution) {
  run_parallel(execution, args.rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    KVSWAP_DISPATCH(quantize_rows)(args, begin, end);
  });
}

void fp8_dequantize(const Fp8Args& args, const Execution& execution) {
  run_parallel(execution, args.rows, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    KVSWAP_DISPATCH(dequantize_rows)(args, begin, end);
  });
}

}  // namespace kvswap
#endif  // HWY_ONCE
