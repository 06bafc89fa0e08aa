#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <utility>

#include "kernels/group_mass.h"
#include "kernels/observe_keys.h"
#include "kernels/records.h"
#include "kernels/types.h"
#include "torch/parallel.h"

namespace kvswap {

inline constexpr int64_t kGroupTokensMax = 64;  // a page's mask has as many bits
inline constexpr int64_t kIndexMax = std::numeric_limits<int32_t>::max();
using OptionalTensor = std::optional<at::Tensor>;

inline DType to_dtype(at::ScalarType type) {
  return type == at::kFloat      ? DType::kFloat32
         : type == at::kBFloat16 ? DType::kBFloat16
         : type == at::kHalf     ? DType::kFloat16
                                 : DType::kInt8;
}

inline Execution torch_execution() { return {.parallel = &at_parallel_for()}; }

/// Contiguous fp32 numbers of the host, of so many dimensions, as a caller gives them.
inline at::Tensor host_numbers(const char* what, const at::Tensor& numbers, int64_t dimensions) {
  TORCH_CHECK_VALUE(
      numbers.dim() == dimensions && numbers.is_cpu() && numbers.scalar_type() == at::kFloat, what,
      " must have ", dimensions, " dimensions, fp32 on the CPU, got ", numbers.sizes(), " of ",
      numbers.scalar_type(), " on ", numbers.device());
  return numbers.contiguous();
}

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
inline void check_floating(const char* where, const char* name, at::ScalarType type) {
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

// What each op demands of its arguments, on every device; op_checks.cpp. Shapes are schema.cpp's.

/// The shape of a page.
RecordShape check_pages(const char* where, const at::Tensor& pages, const at::Tensor& table);

struct AttentionInputs {
  const at::Tensor& query;
  const at::Tensor& pages;
  const at::Tensor& table;
  const at::Tensor& masks;
  const at::Tensor& positions;
  const at::Tensor& query_positions;
};
/// Pages and table are checked.
void check_attention(const char* where, const AttentionInputs& inputs, const RecordShape& shape);
/// What scores are made with: what is not attended is -inf before either.
void check_terms(const char* where, double scale, double softcap);

/// Of attention whose inputs are checked: [batch, heads, queries] fp32.
void check_log_sum_exp(const char* where, const at::Tensor& log_sum_exp, const at::Tensor& query);

struct ObservedInputs {
  const at::Tensor& query;
  const at::Tensor& keys;
  const OptionalTensor& valid;
  const OptionalTensor& log_sum_exp;
};
void check_observed(const ObservedInputs& inputs);
/// What stands in the tensors; the last dimension of both is contiguous.
ObserveKeysArgs observe_args(const at::Tensor& query, const at::Tensor& keys, double scale);
/// [batch, tokens] bool to [batch, ceil(tokens / 64)] int64, a bit a token.
at::Tensor packed_bits(const at::Tensor& valid);

/// `sinks` [heads] fp32 of an attention over `query`, checked; undefined when there are none.
at::Tensor contiguous_sinks(const char* where, const std::optional<at::Tensor>& sinks,
                            const at::Tensor& query);

void check_merge(const at::Tensor& output, const at::Tensor& log_sum_exp,
                 const at::Tensor& other_output, const at::Tensor& other_log_sum_exp);

void check_pack(const at::Tensor& keys, const at::Tensor& values, int64_t group_tokens);
/// Keys and values of `tokens` tokens, not filled yet: [batch, kv_heads, tokens, head_dim], which
/// "nhd" lays out token by token.
std::pair<at::Tensor, at::Tensor> check_unpack(const at::Tensor& records, int64_t tokens,
                                               c10::string_view layout);

void check_fp8_quantize(const at::Tensor& source);
void check_fp8_dequantize(const at::Tensor& quantized, const at::Tensor& scales,
                          at::ScalarType dtype);

/// An int8 summary has token_scale, another has none.
void check_summary(const char* where, const at::Tensor& summary, const OptionalTensor& token_scale);
void check_score(const at::Tensor& summary, const at::Tensor& query);
void check_group_max(const at::Tensor& scores, int64_t group_tokens);
HeadJoin check_mass(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                    c10::string_view join);
void check_top_k(const at::Tensor& scores, int64_t k);
void check_select(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                  int64_t k);
void check_token_bounds(const char* name, const at::Tensor& bounds, int64_t batch);
/// The summary's dtype.
at::ScalarType check_project(const at::Tensor& keys, const at::Tensor& projection,
                             std::optional<at::ScalarType> summary_dtype);

}  // namespace kvswap
