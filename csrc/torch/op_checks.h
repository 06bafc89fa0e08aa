#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/types.h"
#include "torch/parallel.h"

namespace kvswap {

inline constexpr int64_t kGroupTokensMax = 64;  // a page's mask has as many bits

inline DType to_dtype(at::ScalarType type) {
  return type == at::kFloat      ? DType::kFloat32
         : type == at::kBFloat16 ? DType::kBFloat16
         : type == at::kHalf     ? DType::kFloat16
                                 : DType::kInt8;
}

inline Execution torch_execution() { return {.parallel = &at_parallel_for()}; }

/// `sizes` with -1 for any size; `names` says what they are: "[batch, tokens]".
inline void check_shape(const char* where, const char* name, const at::Tensor& tensor,
                        const char* names, at::IntArrayRef sizes) {
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; fits && i < tensor.dim(); ++i) {
    fits = sizes[i] == -1 || sizes[i] == tensor.size(i);
  }
  TORCH_CHECK_VALUE(fits, where, ": ", name, " must be ", names, " = ", sizes, " (-1: any), got ",
                    tensor.sizes());
}

inline void check_dtype(const char* where, const char* name, const at::Tensor& tensor,
                        at::ScalarType type) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == type, where, ": ", name, " must be ", type, ", got ",
                    tensor.scalar_type());
}

/// fp32, bf16 or fp16.
inline void check_floating(const char* where, const char* name, const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, where, ": ",
                    name, " must be float32, bfloat16 or float16, got ", type);
}

inline void check_range(const char* where, const char* name, int64_t value, int64_t low,
                        int64_t high) {
  TORCH_CHECK_VALUE(low <= value && value <= high, where, ": ", name, " must be ", low, "..", high,
                    ", got ", value);
}

/// A tensor whose last dimension has stride 1, copied only where it has not.
inline at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace kvswap
