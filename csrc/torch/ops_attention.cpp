#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "kernels/attention_mass.h"
#include "kernels/merge_attention.h"
#include "kernels/observe_keys.h"
#include "kernels/paged_attention.h"
#include "kernels/paged_gather.h"
#include "torch/op_checks.h"

namespace kvswap {
namespace {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

/// Pages and the addresses that a table of slots stands for.
struct PageTable {
  PageTable(const char* where, const at::Tensor& page_tensor, const at::Tensor& table)
      : shape(check_pages(where, page_tensor, table)), pages(page_tensor.contiguous()) {
    const at::Tensor slots = table.contiguous();
    const char* base = static_cast<const char*>(pages.const_data_ptr());
    for (int64_t i = 0; i < slots.numel(); ++i) {
      const int32_t slot = slots.const_data_ptr<int32_t>()[i];
      check_range(where, "slots in table", slot, -1, pages.size(0) - 1);
      addresses.push_back(slot < 0 ? nullptr : base + slot * shape.payload_bytes());
    }
  }

  RecordShape shape;
  at::Tensor pages;
  std::vector<const void*> addresses;  // [batch, table_heads, pages]; null for slot -1
};

TensorPair paged_gather_cpu(const at::Tensor& pages, const at::Tensor& table) {
  const PageTable source("paged_gather", pages, table);
  PagedGatherArgs args;
  args.pages = source.addresses.data();
  args.pages_max = table.size(2);
  args.table_heads = table.size(1);
  args.batch = table.size(0);
  args.shape = source.shape;
  const auto sizes = {args.batch, args.kv_heads(), args.pages_max * args.shape.group_tokens,
                      args.shape.head_dim};
  at::Tensor keys = at::empty(sizes, pages.options());
  at::Tensor values = at::empty(sizes, pages.options());
  args.keys = keys.data_ptr();
  args.values = values.data_ptr();
  paged_gather(args, torch_execution());
  return {keys, values};
}

/// Attention's arguments, checked, and what they point to.
class AttentionCall {
 public:
  AttentionCall(const char* where, const AttentionInputs& inputs, double scale, double softcap)
      : source_(where, inputs.pages, inputs.table),
        page_counts_(inputs.table.size(0) * inputs.table.size(1), inputs.table.size(2)) {
    check_attention(where, inputs, source_.shape);
    check_terms(where, scale, softcap);
    rows_ = with_contiguous_rows(inputs.query);
    bits_ = at::where(inputs.table.ge(0), inputs.masks, 0).contiguous();
    positions_ = inputs.positions.contiguous();
    query_positions_ = inputs.query_positions.contiguous();
    args.query = rows_.const_data_ptr();
    args.query_batch_stride = rows_.stride(0);
    args.query_head_stride = rows_.stride(1);
    args.query_token_stride = rows_.stride(2);
    args.pages = source_.addresses.data();
    args.masks = reinterpret_cast<const uint64_t*>(bits_.const_data_ptr<int64_t>());
    args.positions = positions_.const_data_ptr<int32_t>();
    args.page_counts = page_counts_.data();
    args.query_positions = query_positions_.const_data_ptr<int32_t>();
    args.pages_max = inputs.table.size(2);
    args.table_heads = inputs.table.size(1);
    args.batch = inputs.query.size(0);
    args.heads = inputs.query.size(1);
    args.queries = inputs.query.size(2);
    args.scale = static_cast<float>(scale);
    args.softcap = static_cast<float>(softcap);
    args.shape = source_.shape;
    args.dtype = to_dtype(inputs.query.scalar_type());
  }

  PagedAttentionArgs args;  // without output and log_sum_exp

 private:
  PageTable source_;
  at::Tensor rows_, bits_, positions_, query_positions_;
  std::vector<int32_t> page_counts_;
};

TensorPair paged_attention_cpu(const at::Tensor& query, const at::Tensor& pages,
                               const at::Tensor& table, const at::Tensor& masks,
                               const at::Tensor& positions, const at::Tensor& query_positions,
                               double scale, double softcap,
                               const std::optional<at::Tensor>& sinks) {
  AttentionCall call("paged_attention", {query, pages, table, masks, positions, query_positions},
                     scale, softcap);
  at::Tensor output =
      at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  at::Tensor log_sum_exp =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  const at::Tensor sink_scores = contiguous_sinks("paged_attention", sinks, query);
  call.args.sinks = sinks ? sink_scores.const_data_ptr<float>() : nullptr;
  call.args.output = output.data_ptr();
  call.args.log_sum_exp = log_sum_exp.data_ptr<float>();
  paged_attention(call.args, torch_execution());
  return {output, log_sum_exp};
}

TensorPair attention_mass_cpu(const at::Tensor& query, const at::Tensor& pages,
                              const at::Tensor& table, const at::Tensor& masks,
                              const at::Tensor& positions, const at::Tensor& query_positions,
                              const at::Tensor& log_sum_exp, double scale, double softcap) {
  AttentionCall call("attention_mass", {query, pages, table, masks, positions, query_positions},
                     scale, softcap);
  check_log_sum_exp("attention_mass", log_sum_exp, query);
  check_range("attention_mass", "heads", query.size(1), 1, kIndexMax);
  const at::Tensor sums = log_sum_exp.contiguous();
  call.args.log_sum_exp = const_cast<float*>(sums.const_data_ptr<float>());
  const auto sizes = {call.args.batch, call.args.kv_heads(),
                      call.args.pages_max * call.args.shape.group_tokens};
  at::Tensor mean = at::empty(sizes, query.options().dtype(at::kFloat));
  at::Tensor square = at::empty_like(mean);
  attention_mass(
      {.attention = call.args, .mean = mean.data_ptr<float>(), .square = square.data_ptr<float>()},
      torch_execution());
  return {mean, square};
}

TensorPair observe_keys_cpu(const at::Tensor& query, const at::Tensor& keys, double scale,
                            const OptionalTensor& valid, const OptionalTensor& log_sum_exp,
                            double softcap) {
  check_observed({query, keys, valid, log_sum_exp});
  check_terms("observe_keys", scale, softcap);
  const at::Tensor rows = with_contiguous_rows(query);
  const at::Tensor own_keys = with_contiguous_rows(keys);
  const at::Tensor bits = valid ? packed_bits(*valid) : at::Tensor();
  const at::Tensor sums = log_sum_exp ? log_sum_exp->contiguous() : at::Tensor();
  at::Tensor mean = at::empty(keys.sizes().slice(0, 3), keys.options().dtype(at::kFloat));
  at::Tensor square = at::empty_like(mean);
  ObserveKeysArgs args = observe_args(rows, own_keys, scale);
  args.softcap = static_cast<float>(softcap);
  if (valid) args.valid = reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>());
  if (log_sum_exp) args.log_sum_exp = sums.const_data_ptr<float>();
  args.mean = mean.data_ptr<float>();
  args.square = square.data_ptr<float>();
  observe_keys(args, torch_execution());
  return {mean, square};
}

TensorPair merge_attention_cpu(const at::Tensor& output, const at::Tensor& log_sum_exp,
                               const at::Tensor& other_output,
                               const at::Tensor& other_log_sum_exp) {
  check_merge(output, log_sum_exp, other_output, other_log_sum_exp);
  at::Tensor merged = output.clone(at::MemoryFormat::Contiguous);
  at::Tensor merged_log_sum_exp = log_sum_exp.clone(at::MemoryFormat::Contiguous);
  const at::Tensor other = other_output.contiguous();
  const at::Tensor other_sums = other_log_sum_exp.contiguous();
  merge_attention({.output = merged.data_ptr(),
                   .log_sum_exp = merged_log_sum_exp.data_ptr<float>(),
                   .other_output = other.const_data_ptr(),
                   .other_log_sum_exp = other_sums.const_data_ptr<float>(),
                   .rows = log_sum_exp.numel(),
                   .head_dim = output.size(-1),
                   .dtype = to_dtype(output.scalar_type()),
                   .other_dtype = to_dtype(output.scalar_type())},
                  torch_execution());
  return {merged, merged_log_sum_exp};
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) {
  library.impl("paged_gather", paged_gather_cpu);
  library.impl("paged_attention", paged_attention_cpu);
  library.impl("attention_mass", attention_mass_cpu);
  library.impl("observe_keys", observe_keys_cpu);
  library.impl("merge_attention", merge_attention_cpu);
}

}  // namespace kvswap
