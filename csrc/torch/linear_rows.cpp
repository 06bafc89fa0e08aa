#include "torch/linear_rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "kernels/linear_rows.h"
#include "torch/op_checks.h"

namespace kvswap {

at::Tensor linear_rows_cpu(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias) {
  const char* where = "linear_rows";
  const at::ScalarType type = weight.scalar_type();
  check_shape(where, "weight", weight, "[outputs, inputs]", {-1, -1});
  TORCH_CHECK_VALUE(weight.is_contiguous(), where, ": weight must be contiguous");
  check_floating(where, "weight", type);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(-1) == inputs, where, ": input must be [..., ",
                    inputs, "], got ", input.sizes());
  check_dtype(where, "input", input, type);
  if (bias) {
    check_shape(where, "bias", *bias, "[outputs]", {outputs});
    check_dtype(where, "bias", *bias, type);
  }
  const at::Tensor rows = input.contiguous();
  const at::Tensor added = bias ? bias->contiguous() : at::Tensor();
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = outputs;
  at::Tensor output = at::empty(sizes, input.options().requires_grad(false));
  if (output.numel() == 0) return output;
  linear_rows({.weight = weight.const_data_ptr(),
               .bias = bias ? added.const_data_ptr() : nullptr,
               .input = rows.const_data_ptr(),
               .output = output.data_ptr(),
               .outputs = outputs,
               .inputs = inputs,
               .rows = output.numel() / outputs,
               .dtype = to_dtype(type)},
              torch_execution());
  return output;
}

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) { library.impl("linear_rows", linear_rows_cpu); }

}  // namespace kvswap
