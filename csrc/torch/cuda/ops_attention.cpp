#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "kernels/cuda/kernels.h"
#include "torch/cuda/device_call.h"

namespace kvswap {
namespace {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

/// Pages and the addresses that a table of slots stands for. Slots are checked on the device: one
/// out of range is a device-side assertion, as an index out of range is in torch.
struct PageTable {
  PageTable(const char* where, const at::Tensor& page_tensor, const at::Tensor& table)
      : shape(check_pages(where, page_tensor, table)), pages(page_tensor.contiguous()) {
    at::_assert_async(table.ge(-1).logical_and(table.lt(pages.size(0))).all(),
                      "kvswap_torch: slots in a page table must be -1 or a page");
    const auto base = reinterpret_cast<int64_t>(pages.const_data_ptr());
    addresses =
        at::where(table.ge(0), table.to(at::kLong) * shape.payload_bytes() + base, 0).contiguous();
  }

  RecordShape shape;
  at::Tensor pages;
  at::Tensor addresses;  // [batch, table_heads, pages] int64; 0 for slot -1
};

TensorPair paged_gather_cuda(const at::Tensor& pages, const at::Tensor& table) {
  const DeviceCall call("paged_gather", pages, {{"table", &table}});
  const PageTable source("paged_gather", pages, table);
  PagedGatherArgs args;
  args.pages = address_table<const void*>(source.addresses);
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
  check_status(cuda::paged_gather(args, call.stream()));
  return {keys, values};
}

TensorPair paged_attention_cuda(const at::Tensor& query, const at::Tensor& pages,
                                const at::Tensor& table, const at::Tensor& masks,
                                const at::Tensor& columns, const at::Tensor& query_columns,
                                double scale, double softcap,
                                const std::optional<at::Tensor>& sinks) {
  const DeviceCall call("paged_attention", query,
                        {{"pages", &pages},
                         {"table", &table},
                         {"masks", &masks},
                         {"columns", &columns},
                         {"query_columns", &query_columns}});
  const PageTable source("paged_attention", pages, table);
  check_attention({query, source.pages, table, masks, columns, query_columns}, source.shape);
  const at::Tensor rows = with_contiguous_rows(query);
  const at::Tensor page_columns = columns.contiguous();
  const at::Tensor first_columns = query_columns.contiguous();
  const at::Tensor bits = masks.contiguous();
  const at::Tensor page_counts =
      at::full({table.size(0) * table.size(1)}, table.size(2), table.options());
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
  args.pages = address_table<const void*>(source.addresses);
  args.masks = reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>());
  args.columns = page_columns.const_data_ptr<int32_t>();
  args.page_counts = page_counts.const_data_ptr<int32_t>();
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
  const at::Tensor scratch = make_scratch(cuda::paged_attention_scratch_bytes(args), query);
  check_status(cuda::paged_attention(args, scratch.data_ptr(), call.stream()));
  return {output, log_sum_exp};
}

TensorPair merge_attention_cuda(const at::Tensor& output, const at::Tensor& log_sum_exp,
                                const at::Tensor& other_output,
                                const at::Tensor& other_log_sum_exp) {
  const DeviceCall call("merge_attention", output,
                        {{"log_sum_exp", &log_sum_exp},
                         {"other_output", &other_output},
                         {"other_log_sum_exp", &other_log_sum_exp}});
  check_merge(output, log_sum_exp, other_output, other_log_sum_exp);
  at::Tensor merged = output.clone(at::MemoryFormat::Contiguous);
  at::Tensor merged_log_sum_exp = log_sum_exp.clone(at::MemoryFormat::Contiguous);
  const at::Tensor other = other_output.contiguous();
  const at::Tensor other_sums = other_log_sum_exp.contiguous();
  check_status(cuda::merge_attention({.output = merged.data_ptr(),
                                      .log_sum_exp = merged_log_sum_exp.data_ptr<float>(),
                                      .other_output = other.const_data_ptr(),
                                      .other_log_sum_exp = other_sums.const_data_ptr<float>(),
                                      .rows = log_sum_exp.numel(),
                                      .head_dim = output.size(-1),
                                      .dtype = to_dtype(output.scalar_type()),
                                      .other_dtype = to_dtype(output.scalar_type())},
                                     call.stream()));
  return {merged, merged_log_sum_exp};
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CUDA, library) {
  library.impl("paged_gather", paged_gather_cuda);
  library.impl("paged_attention", paged_attention_cuda);
  library.impl("merge_attention", merge_attention_cuda);
}

}  // namespace kvswap
