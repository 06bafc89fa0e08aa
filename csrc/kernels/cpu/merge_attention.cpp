#include "kernels/merge_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/merge_attention.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// output = weight * output + other_weight * other
template <typename T, typename Other>
void blend(T* output, float weight, const Other* other, float other_weight, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats weighted = multiply(load(output + i), fill(weight));
    store(multiply_add(load(other + i), fill(other_weight), weighted), output + i);
  }
  if (i < size) {
    const Floats weighted = multiply(load_some(output + i, size - i), fill(weight));
    store_some(multiply_add(load_some(other + i, size - i), fill(other_weight), weighted),
               output + i, size - i);
  }
}

template <typename T, typename Other>
void merge_typed(const MergeAttentionArgs& args, int64_t begin, int64_t end) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (int64_t row = begin; row < end; ++row) {
    T* output = static_cast<T*>(args.output) + row * args.head_dim;
    const Other* other = static_cast<const Other*>(args.other_output) + row * args.head_dim;
    const float mine = args.log_sum_exp[row];
    const float theirs = args.other_log_sum_exp[row];
    const float larger = mine == kNothing ? theirs : std::max(mine, theirs);
    if (larger == kNothing) {
      std::fill_n(output, args.head_dim, T{});
      continue;
    }
    if (theirs == kNothing) continue;
    const float weight = std::exp(mine - larger);
    const float other_weight = std::exp(theirs - larger);
    const float total = weight + other_weight;
    if (weight == 0.0f) {
      // What stands in `output` may be anything.
      std::transform(other, other + args.head_dim, output,
                     [](Other value) { return from_float<T>(to_float(value)); });
    } else {
      blend(output, weight / total, other, other_weight / total, args.head_dim);
    }
    args.log_sum_exp[row] = larger + std::log(total);
  }
}

void merge_into_floats(const MergeAttentionArgs& args, int64_t begin, int64_t end) {
  switch (args.other_dtype) {
    case DType::kFloat32:
      return merge_typed<float, float>(args, begin, end);
    case DType::kBFloat16:
      return merge_typed<float, BFloat16>(args, begin, end);
    case DType::kFloat16:
      return merge_typed<float, Float16>(args, begin, end);
    case DType::kInt8:
    case DType::kInt4:
      return;
  }
}

void merge_rows(const MergeAttentionArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::kFloat32:
      return merge_into_floats(args, begin, end);
    case DType::kBFloat16:
      return merge_typed<BFloat16, BFloat16>(args, begin, end);
    case DType::kFloat16:
      return merge_typed<Float16, Float16>(args, begin, end);
    case DType::kInt8:
    case DType::kInt4:
      return;
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(merge_rows);

void merge_attention(const MergeAttentionArgs& args, const Execution& execution) {
  constexpr int64_t kRowsPerPiece = 64;
  run_parallel(execution, args.rows, kRowsPerPiece,
               [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(merge_rows)(args, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
