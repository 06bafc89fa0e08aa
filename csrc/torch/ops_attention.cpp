#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "kernels/merge_attention.h"
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

TensorPair paged_attention_cpu(const at::Tensor& query, const at::Tensor& pages,
                               const at::Tensor& table, const at::Tensor& masks,
                               const at::Tensor& columns, const at::Tensor& query_columns,
                               double scale, double softcap,
                               const std::optional<at::Tensor>& sinks) {
  const PageTable source("paged_attention", pages, table);
  check_attention({query, source.pages, table, masks, columns, query_columns}, source.shape);
  const at::Tensor rows = with_contiguous_rows(query);
  const at::Tensor page_columns = columns.contiguous();
  const at::Tensor first_columns = query_columns.contiguous();
  const at::Tensor bits = at::where(table.ge(0), masks, 0).contiguous();
  const std::vector<int32_t> page_counts(table.size(0) * table.size(1), table.size(2));
  at::Tensor output =
      at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  at::Tensor log_sum_exp =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  PagedAttentionArgs args;
  args.query = rows.const_data_ptr();
  args.query_batch_stride = rows.stride(0);
  args.query_head_stride = rows.stride(1);
  args.query_token_stride = rows.stride(2);
  args.output = output.data_ptr();
  args.log_sum_exp = log_sum_exp.data_ptr<float>();
  args.pages = source.addresses.data();
  args.masks = reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>());
  args.columns = page_columns.const_data_ptr<int32_t>();
  args.page_counts = page_counts.data();
  args.query_columns = first_columns.const_data_ptr<int32_t>();
  args.pages_max = table.size(2);
  args.table_heads = table.size(1);
  args.batch = query.size(0);
  args.heads = query.size(1);
  args.queries = query.size(2);
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
  const at::Tensor sink_scores = contiguous_sinks("paged_attention", sinks, query);
  args.sinks = sinks ? sink_scores.const_data_ptr<float>() : nullptr;
  args.shape = source.shape;
  args.dtype = to_dtype(query.scalar_type());
  paged_attention(args, torch_execution());
  return {output, log_sum_exp};
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
  library.impl("merge_attention", merge_attention_cpu);
}

}  // namespace kvswap
