#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "kernels/cuda/kernels.h"
#include "torch/cuda/device_call.h"

namespace kvswap {
namespace {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

enum class Direction { kPack, kUnpack };

/// Between keys and values [batch, kv_heads, tokens, head_dim] of any strides and contiguous
/// records [batch, groups, kv_heads, 2, group_tokens, head_dim].
void transfer(Direction direction, const DeviceCall& call, const at::Tensor& keys,
              const at::Tensor& values, const at::Tensor& records) {
  const int64_t groups = records.size(1);
  const int64_t group_tokens = records.size(4);
  const int64_t count = records.size(0) * groups;
  if (count == 0) return;
  const RecordShape shape{records.size(2), group_tokens, records.size(5), records.element_size()};
  const at::Tensor targets = addresses(records, shape.payload_bytes(), count);
  const at::Tensor index = counted(count, records);
  const at::Tensor sequences = index.floor_divide(groups).to(at::kInt);
  const at::Tensor first_tokens = index.remainder(groups) * group_tokens;
  const at::Tensor lengths = (keys.size(2) - first_tokens).clamp_max(group_tokens).to(at::kInt);
  const cuda::BatchTransferArgs args{.shape = shape,
                                     .tokens = {.keys = keys.data_ptr(),
                                                .values = values.data_ptr(),
                                                .key_head_stride = keys.stride(1),
                                                .key_token_stride = keys.stride(2),
                                                .value_head_stride = values.stride(1),
                                                .value_token_stride = values.stride(2)},
                                     .key_batch_stride = keys.stride(0),
                                     .value_batch_stride = values.stride(0),
                                     .records = address_table<void*>(targets),
                                     .sequences = sequences.const_data_ptr<int32_t>(),
                                     .first_tokens = first_tokens.const_data_ptr<int64_t>(),
                                     .lengths = lengths.const_data_ptr<int32_t>(),
                                     .count = count};
  check_status(direction == Direction::kPack ? cuda::pack_records(args, call.stream())
                                             : cuda::unpack_records(args, call.stream()));
}

at::Tensor pack_records_cuda(const at::Tensor& keys, const at::Tensor& values,
                             int64_t group_tokens) {
  const DeviceCall call("pack_records", keys, {{"values", &values}});
  check_pack(keys, values, group_tokens);
  const int64_t groups = (keys.size(2) + group_tokens - 1) / group_tokens;
  at::Tensor records = at::empty(
      {keys.size(0), groups, keys.size(1), 2, group_tokens, keys.size(3)}, keys.options());
  if (keys.size(2) % group_tokens != 0) records.select(1, groups - 1).zero_();
  transfer(Direction::kPack, call, with_contiguous_rows(keys), with_contiguous_rows(values),
           records);
  return records;
}

TensorPair unpack_records_cuda(const at::Tensor& records, int64_t tokens, c10::string_view layout) {
  const DeviceCall call("unpack_records", records, {});
  const auto [keys, values] = check_unpack(records, tokens, layout);
  if (tokens == 0) return {keys, values};
  const int64_t groups = (tokens + records.size(4) - 1) / records.size(4);
  transfer(Direction::kUnpack, call, keys, values, aligned(records.slice(1, 0, groups)));
  return {keys, values};
}

TensorPair fp8_quantize_cuda(const at::Tensor& source) {
  const DeviceCall call("fp8_quantize", source, {});
  check_fp8_quantize(source);
  const at::Tensor rows = aligned(source);
  at::Tensor quantized = at::empty(source.sizes(), source.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor scales =
      at::empty(source.sizes().slice(0, source.dim() - 1), source.options().dtype(at::kFloat));
  check_status(cuda::fp8_quantize({.source = rows.const_data_ptr(),
                                   .target = quantized.data_ptr(),
                                   .scales = scales.data_ptr<float>(),
                                   .rows = scales.numel(),
                                   .head_dim = source.size(-1),
                                   .dtype = to_dtype(source.scalar_type())},
                                  call.stream()));
  return {quantized, scales};
}

at::Tensor fp8_dequantize_cuda(const at::Tensor& quantized, const at::Tensor& scales,
                               at::ScalarType dtype) {
  const DeviceCall call("fp8_dequantize", quantized, {{"scales", &scales}});
  check_fp8_dequantize(quantized, scales, dtype);
  at::Tensor target = at::empty(quantized.sizes(), quantized.options().dtype(dtype));
  const at::Tensor rows = aligned(quantized);
  at::Tensor row_scales = scales.contiguous();
  check_status(cuda::fp8_dequantize({.source = rows.const_data_ptr(),
                                     .target = target.data_ptr(),
                                     .scales = row_scales.data_ptr<float>(),
                                     .rows = scales.numel(),
                                     .head_dim = quantized.size(-1),
                                     .dtype = to_dtype(dtype)},
                                    call.stream()));
  return target;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CUDA, library) {
  library.impl("pack_records", pack_records_cuda);
  library.impl("unpack_records", unpack_records_cuda);
  library.impl("fp8_quantize", fp8_quantize_cuda);
  library.impl("fp8_dequantize", fp8_dequantize_cuda);
}

}  // namespace kvswap
