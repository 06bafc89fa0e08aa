#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
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
      : shape(check_pages(where, page_tensor, table)), pages(aligned(page_tensor)) {
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

/// Attention's arguments, checked, and what they point to.
class AttentionCall {
 public:
  AttentionCall(const char* where, const AttentionInputs& inputs, double scale, double softcap)
      : source_(where, inputs.pages, inputs.table) {
    check_attention(where, inputs, source_.shape);
    check_terms(where, scale, softcap);
    rows_ = with_contiguous_rows(inputs.query);
    bits_ = inputs.masks.contiguous();
    positions_ = inputs.positions.contiguous();
    query_positions_ = inputs.query_positions.contiguous();
    page_counts_ = at::full({inputs.table.size(0) * inputs.table.size(1)}, inputs.table.size(2),
                            inputs.table.options());
    args.query = rows_.const_data_ptr();
    args.query_batch_stride = rows_.stride(0);
    args.query_head_stride = rows_.stride(1);
    args.query_token_stride = rows_.stride(2);
    args.pages = address_table<const void*>(source_.addresses);
    args.masks = reinterpret_cast<const uint64_t*>(bits_.const_data_ptr<int64_t>());
    args.positions = positions_.const_data_ptr<int32_t>();
    args.page_counts = page_counts_.const_data_ptr<int32_t>();
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
  at::Tensor rows_, bits_, positions_, query_positions_, page_counts_;
};

TensorPair paged_attention_cuda(const at::Tensor& query, const at::Tensor& pages,
                                const at::Tensor& table, const at::Tensor& masks,
                                const at::Tensor& positions, const at::Tensor& query_positions,
                                double scale, double softcap,
                                const std::optional<at::Tensor>& sinks) {
  const DeviceCall call("paged_attention", query,
                        {{"pages", &pages},
                         {"table", &table},
                         {"masks", &masks},
                         {"positions", &positions},
                         {"query_positions", &query_positions}});
  AttentionCall inputs("paged_attention", {query, pages, table, masks, positions, query_positions},
                       scale, softcap);
  at::Tensor output =
      at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  at::Tensor log_sum_exp =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  const at::Tensor sink_scores = contiguous_sinks("paged_attention", sinks, query);
  inputs.args.sinks = sinks ? sink_scores.const_data_ptr<float>() : nullptr;
  inputs.args.output = output.data_ptr();
  inputs.args.log_sum_exp = log_sum_exp.data_ptr<float>();
  const at::Tensor scratch = make_scratch(cuda::paged_attention_scratch_bytes(inputs.args), query);
  check_status(cuda::paged_attention(inputs.args, scratch.data_ptr(), call.stream()));
  return {output, log_sum_exp};
}

TensorPair attention_mass_cuda(const at::Tensor& query, const at::Tensor& pages,
                               const at::Tensor& table, const at::Tensor& masks,
                               const at::Tensor& positions, const at::Tensor& query_positions,
                               const at::Tensor& log_sum_exp, double scale, double softcap) {
  const DeviceCall call("attention_mass", query,
                        {{"pages", &pages},
                         {"table", &table},
                         {"masks", &masks},
                         {"positions", &positions},
                         {"query_positions", &query_positions},
                         {"log_sum_exp", &log_sum_exp}});
  AttentionCall inputs("attention_mass", {query, pages, table, masks, positions, query_positions},
                       scale, softcap);
  check_log_sum_exp("attention_mass", log_sum_exp, query);
  check_range("attention_mass", "heads", query.size(1), 1, kIndexMax);
  const at::Tensor sums = log_sum_exp.contiguous();
  inputs.args.log_sum_exp = const_cast<float*>(sums.const_data_ptr<float>());
  const auto sizes = {inputs.args.batch, inputs.args.kv_heads(),
                      inputs.args.pages_max * inputs.args.shape.group_tokens};
  at::Tensor mean = at::empty(sizes, query.options().dtype(at::kFloat));
  at::Tensor square = at::empty_like(mean);
  check_status(cuda::attention_mass({.attention = inputs.args,
                                     .mean = mean.data_ptr<float>(),
                                     .square = square.data_ptr<float>()},
                                    call.stream()));
  return {mean, square};
}

TensorPair observe_keys_cuda(const at::Tensor& query, const at::Tensor& keys, double scale,
                             const OptionalTensor& valid, const OptionalTensor& log_sum_exp,
                             double softcap) {
  const DeviceCall call("observe_keys", query,
                        {{"keys", &keys},
                         {"valid", valid ? &*valid : &keys},
                         {"log_sum_exp", log_sum_exp ? &*log_sum_exp : &keys}});
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
  const at::Tensor scratch = make_scratch(cuda::observe_keys_scratch_bytes(args), query);
  check_status(cuda::observe_keys(args, scratch.data_ptr(), call.stream()));
  return {mean, square};
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
  const at::Tensor other = aligned(other_output);
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
  library.impl("attention_mass", attention_mass_cuda);
  library.impl("observe_keys", observe_keys_cuda);
  library.impl("merge_attention", merge_attention_cuda);
}

}  // namespace kvswap
