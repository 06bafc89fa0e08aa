#include "torch/partial_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/chunk_attention.h"
#include "kernels/cpu_features.h"
#include "kernels/merge_attention.h"
#include "torch/op_checks.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kScoresMax = 16 << 20;  // computed at once
/// Query rows that a mask is built for at once, so that it never grows with the square.
constexpr int64_t kMaskedRows = 512;

/// The same in memory of the order [rows, heads, ...], in which flash attention leaves it.
at::Tensor in_rows(const at::Tensor& tensor) {
  return tensor.transpose(0, 1).contiguous().transpose(0, 1);
}

PartialAttention flash_on_cpu(const at::Tensor& query, const at::Tensor& keys,
                              const at::Tensor& values, Causal causal,
                              const std::optional<at::Tensor>& allowed, double scale) {
  std::optional<at::Tensor> mask;
  if (allowed) {
    mask = at::zeros(allowed->sizes(), query.scalar_type())
               .masked_fill_(allowed->logical_not(), kNever)
               .expand({1, 1, query.size(1), keys.size(1)})
               .contiguous();
  }
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query.unsqueeze(0), keys.unsqueeze(0), as_wide_as(values, keys).unsqueeze(0), 0.0,
      causal == Causal::kYes, mask, scale);
  return {output.squeeze(0).narrow(-1, 0, values.size(-1)), log_sum_exp.squeeze(0).to(at::kFloat)};
}

PartialAttention flash_on_cuda(const at::Tensor& query, const at::Tensor& keys,
                               const at::Tensor& values, Causal causal, double scale) {
  const auto result = at::_scaled_dot_product_flash_attention(
      query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, causal == Causal::kYes,
      /*return_debug_mask=*/false, scale);
  const at::Tensor log_sum_exp = std::get<1>(result).narrow(-1, 0, query.size(1));
  return {std::get<0>(result).squeeze(0).to(at::kFloat).contiguous(),
          log_sum_exp.squeeze(0).to(at::kFloat).contiguous()};
}

/// Rows [first, first + count) of attend_part_in_rows().
PartialAttention attend_rows(const at::Tensor& query, const at::Tensor& keys,
                             const at::Tensor& values, int64_t first,
                             const std::optional<at::Tensor>& allowed, const ScoreRule& rule) {
  const int64_t heads = query.size(0);
  const int64_t rows = query.size(1);
  const int64_t kv_heads = keys.size(0);
  const at::Tensor grouped =
      query.to(at::kFloat).reshape({kv_heads, heads / kv_heads * rows, query.size(2)});
  at::Tensor scores = at::bmm(grouped, keys.to(at::kFloat).transpose(1, 2))
                          .mul_(rule.scale)
                          .view({heads, rows, keys.size(1)});
  if (rule.softcap > 0) scores.div_(rule.softcap).tanh_().mul_(rule.softcap);
  if (allowed) {
    const at::Tensor mask = allowed->dim() == 1 ? *allowed : allowed->narrow(0, first, rows);
    scores.masked_fill_(mask.logical_not(), kNever);
  }
  const at::Tensor log_sum_exp = at::logsumexp(scores, -1);
  const at::Tensor sees_nothing = log_sum_exp.eq(kNever);
  const at::Tensor weights =
      scores.sub_(log_sum_exp.masked_fill(sees_nothing, 0.0).unsqueeze(-1)).exp_();
  const at::Tensor output =
      at::bmm(weights.view({kv_heads, -1, keys.size(1)}), values.to(at::kFloat))
          .view({heads, rows, values.size(2)});
  return {output, log_sum_exp};
}

}  // namespace

at::Tensor as_wide_as(const at::Tensor& values, const at::Tensor& keys) {
  const int64_t missing = keys.size(-1) - values.size(-1);
  return missing == 0 ? values : at::constant_pad_nd(values, {0, missing});
}

PartialAttention attend_part(const at::Tensor& query, const at::Tensor& keys,
                             const at::Tensor& values, Causal causal,
                             const std::optional<at::Tensor>& allowed, const ScoreRule& rule) {
  if (rule.softcap > 0) return attend_part_in_rows(query, keys, values, causal, allowed, rule);
  if (query.is_cpu()) return flash_on_cpu(query, keys, values, causal, allowed, rule.scale);
  const bool is_half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  if (query.is_cuda() && is_half && !allowed && query.size(2) % 8 == 0) {
    return flash_on_cuda(query, keys, values, causal, rule.scale);
  }
  return attend_part_in_rows(query, keys, values, causal, allowed, rule);
}

PartialAttention attend_part_in_rows(const at::Tensor& query, const at::Tensor& keys,
                                     const at::Tensor& values, Causal causal,
                                     const std::optional<at::Tensor>& allowed,
                                     const ScoreRule& rule) {
  const int64_t rows = query.size(1);
  const int64_t at_once =
      std::max<int64_t>(1, kScoresMax / std::max<int64_t>(1, query.size(0) * keys.size(1)));
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> log_sum_exps;
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    // Row i of a causal chunk sees keys 0..i.
    const int64_t seen = causal == Causal::kYes ? first + count : keys.size(1);
    std::optional<at::Tensor> mask = allowed;
    if (causal == Causal::kYes) {
      const auto like = query.options().dtype(at::kLong);
      mask = at::arange(seen, like).le(at::arange(rows, like).unsqueeze(1));
    }
    PartialAttention part = attend_rows(query.narrow(1, first, count), keys.narrow(1, 0, seen),
                                        values.narrow(1, 0, seen), first, mask, rule);
    outputs.push_back(part.output);
    log_sum_exps.push_back(part.log_sum_exp);
  }
  return {at::cat(outputs, 1).contiguous(), at::cat(log_sum_exps, 1).contiguous()};
}

PartialAttention attend_own_masked(const at::Tensor& query, const at::Tensor& keys,
                                   const at::Tensor& values, const at::Tensor& valid,
                                   const ScoreRule& rule) {
  const int64_t tokens = query.size(1);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> log_sum_exps;
  const auto like = valid.options().dtype(at::kLong);
  const at::Tensor columns = at::arange(tokens, like);
  for (int64_t row = 0; row < tokens; row += kMaskedRows) {
    const int64_t end = std::min(tokens, row + kMaskedRows);
    const at::Tensor rows = at::arange(row, end, like).unsqueeze(1);
    const at::Tensor allowed =
        columns.le(rows).logical_and(valid).logical_or(columns.eq(rows)).narrow(1, 0, end);
    PartialAttention part = attend_part(query.narrow(1, row, end - row), keys.narrow(1, 0, end),
                                        values.narrow(1, 0, end), Causal::kNo, allowed, rule);
    outputs.push_back(part.output);
    log_sum_exps.push_back(part.log_sum_exp);
  }
  return {at::cat(outputs, 1).contiguous(), at::cat(log_sum_exps, 1).contiguous()};
}

bool is_chunk_attention_fast(DType dtype) {
  return simd_level() != "SCALAR" && (dtype != DType::kBFloat16 || !has_bf16_tiles());
}

void add_sinks(PartialAttention& partial, const at::Tensor& sinks) {
  const at::Tensor scores = sinks.unsqueeze(1);
  const at::Tensor share = at::sigmoid(partial.log_sum_exp - scores).unsqueeze(-1);
  partial.output = partial.output * share;
  partial.log_sum_exp = at::logaddexp(partial.log_sum_exp, scores);
}

void merge_part(PartialAttention& into, const PartialAttention& other) {
  if (!into.output.is_cpu()) return merge_part_in_torch(into, other);
  into = {in_rows(into.output.to(at::kFloat)), in_rows(into.log_sum_exp)};
  const PartialAttention added = {in_rows(other.output), in_rows(other.log_sum_exp)};
  merge_attention({.output = into.output.data_ptr(),
                   .log_sum_exp = into.log_sum_exp.data_ptr<float>(),
                   .other_output = added.output.const_data_ptr(),
                   .other_log_sum_exp = added.log_sum_exp.const_data_ptr<float>(),
                   .rows = into.log_sum_exp.numel(),
                   .head_dim = into.output.size(-1),
                   .dtype = DType::kFloat32,
                   .other_dtype = to_dtype(added.output.scalar_type())},
                  torch_execution());
}

void merge_part_in_torch(PartialAttention& into, const PartialAttention& other) {
  const at::Tensor merged = at::logaddexp(into.log_sum_exp, other.log_sum_exp);
  const at::Tensor finite = merged.masked_fill(merged.eq(kNever), 0.0);
  const auto weight = [&](const PartialAttention& part) {
    return part.log_sum_exp.sub(finite).exp_().unsqueeze(-1);
  };
  into.output = into.output * weight(into) + other.output * weight(other);
  into.log_sum_exp = merged;
}

}  // namespace kvswap
