#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace kvswap {

/// From here on torch's own product is as fast, or faster.
inline constexpr int64_t kFewRows = 16;

/// at::linear() for few rows, without gradients: see kernels/linear_rows.h.
///
/// input: [..., inputs]; weight: [outputs, inputs] contiguous; bias: [outputs]; all fp32, bf16 or
/// fp16 on the CPU, of one dtype. Returns [..., outputs]. c10::ValueError otherwise.
at::Tensor linear_rows_cpu(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias);

}  // namespace kvswap
