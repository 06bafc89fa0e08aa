#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "kernels/fp8.h"
#include "kernels/records.h"
#include "torch/op_checks.h"

namespace kvswap {
namespace {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

enum class Direction { kPack, kUnpack };

/// Between keys and values [batch, kv_heads, tokens, head_dim] of any strides and records
/// [batch, groups, kv_heads, 2, group_tokens, head_dim].
void transfer(Direction direction, const at::Tensor& keys, const at::Tensor& values,
              const at::Tensor& records) {
  const int64_t groups = records.size(1);
  const int64_t group_tokens = records.size(4);
  const RecordShape shape{records.size(2), group_tokens, records.size(5), records.element_size()};
  constexpr int64_t kPieceRecords = 64;
  const int64_t pieces = (groups + kPieceRecords - 1) / kPieceRecords;
  const auto at_sequence = [](const at::Tensor& tensor, int64_t sequence) -> void* {
    return static_cast<char*>(tensor.data_ptr()) +
           sequence * tensor.stride(0) * tensor.element_size();
  };
  run_parallel(torch_execution(), keys.size(0) * pieces, 1, [&](int64_t begin, int64_t end) {
    void* targets[kPieceRecords];
    int64_t first_tokens[kPieceRecords];
    int32_t lengths[kPieceRecords];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / pieces;
      const int64_t first = i % pieces * kPieceRecords;
      const int64_t count = std::min(kPieceRecords, groups - first);
      for (int64_t r = 0; r < count; ++r) {
        targets[r] = static_cast<char*>(at_sequence(records, sequence)) +
                     (first + r) * shape.payload_bytes();
        first_tokens[r] = (first + r) * group_tokens;
        lengths[r] = static_cast<int32_t>(std::min(group_tokens, keys.size(2) - first_tokens[r]));
      }
      const TransferArgs args{.shape = shape,
                              .tokens = {.keys = at_sequence(keys, sequence),
                                         .values = at_sequence(values, sequence),
                                         .key_head_stride = keys.stride(1),
                                         .key_token_stride = keys.stride(2),
                                         .value_head_stride = values.stride(1),
                                         .value_token_stride = values.stride(2)},
                              .records = targets,
                              .first_tokens = first_tokens,
                              .slots = nullptr,
                              .lengths = lengths,
                              .count = count};
      direction == Direction::kPack ? pack_records(args) : unpack_records(args);
    }
  });
}

at::Tensor pack_records_cpu(const at::Tensor& keys, const at::Tensor& values,
                            int64_t group_tokens) {
  check_pack(keys, values, group_tokens);
  const int64_t groups = (keys.size(2) + group_tokens - 1) / group_tokens;
  at::Tensor records = at::empty(
      {keys.size(0), groups, keys.size(1), 2, group_tokens, keys.size(3)}, keys.options());
  if (keys.size(2) % group_tokens != 0) records.select(1, groups - 1).zero_();
  transfer(Direction::kPack, with_contiguous_rows(keys), with_contiguous_rows(values), records);
  return records;
}

TensorPair unpack_records_cpu(const at::Tensor& records, int64_t tokens, c10::string_view layout) {
  const auto [keys, values] = check_unpack(records, tokens, layout);
  const at::Tensor source = records.contiguous();
  const int64_t groups = (tokens + records.size(4) - 1) / records.size(4);
  transfer(Direction::kUnpack, keys, values, source.slice(1, 0, groups));
  return {keys, values};
}

TensorPair fp8_quantize_cpu(const at::Tensor& source) {
  check_fp8_quantize(source);
  const at::Tensor rows = source.contiguous();
  at::Tensor quantized = at::empty(source.sizes(), source.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor scales =
      at::empty(source.sizes().slice(0, source.dim() - 1), source.options().dtype(at::kFloat));
  fp8_quantize({.source = rows.const_data_ptr(),
                .target = quantized.data_ptr(),
                .scales = scales.data_ptr<float>(),
                .rows = scales.numel(),
                .head_dim = source.size(-1),
                .dtype = to_dtype(source.scalar_type())},
               torch_execution());
  return {quantized, scales};
}

at::Tensor fp8_dequantize_cpu(const at::Tensor& quantized, const at::Tensor& scales,
                              at::ScalarType dtype) {
  check_fp8_dequantize(quantized, scales, dtype);
  at::Tensor target = at::empty(quantized.sizes(), quantized.options().dtype(dtype));
  const at::Tensor rows = quantized.contiguous();
  at::Tensor row_scales = scales.contiguous();
  fp8_dequantize({.source = rows.const_data_ptr(),
                  .target = target.data_ptr(),
                  .scales = row_scales.data_ptr<float>(),
                  .rows = scales.numel(),
                  .head_dim = quantized.size(-1),
                  .dtype = to_dtype(dtype)},
                 torch_execution());
  return target;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) {
  library.impl("pack_records", pack_records_cpu);
  library.impl("unpack_records", unpack_records_cpu);
  library.impl("fp8_quantize", fp8_quantize_cpu);
  library.impl("fp8_dequantize", fp8_dequantize_cpu);
}

}  // namespace kvswap
