#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "kernels/int4_records.h"
#include "kernels/record_codec.h"
#include "torch/op_checks.h"
#include "torch/parallel.h"

namespace kvswap {
namespace {

constexpr const char* kTransfer = "transfer_records";
constexpr int64_t kPieceRows = 16;  // of one thread at least

/// What is copied at once: whole records, or with a row of slots for each KV head a head's K and V.
struct SummaryEncoder {
  at::Tensor source;  // [rows, row]
  at::Tensor target;  // [rows, row], a view
  std::vector<int64_t> from;
  std::vector<int64_t> to;
};

void check_transfer(const at::Tensor& source, const at::Tensor& target, const at::Tensor& from,
                    const at::Tensor& to) {
  constexpr const char* kNames = "[slots, kv_heads, 2, group_tokens, head_dim]";
  check_shape(kTransfer, "source", source, kNames, {-1, -1, 2, -1, -1});
  check_shape(kTransfer, "target", target, kNames, {-1, -1, 2, source.size(3), source.size(4)});
  check_dtype(kTransfer, "target", target, source.scalar_type());
  TORCH_CHECK_VALUE(target.is_contiguous(), kTransfer,
                    ": target must be contiguous, since it is written in place, got strides ",
                    target.strides());
  check_shape(kTransfer, "source_slots", from, "[1 or kv_heads, count]", {-1, -1});
  check_shape(kTransfer, "target_slots", to, "the shape of source_slots", from.sizes());
  for (const auto& [name, slots] : {std::pair{"source_slots", &from}, {"target_slots", &to}}) {
    check_dtype(kTransfer, name, *slots, at::kInt);
    TORCH_CHECK_VALUE(slots->is_cpu(), kTransfer, ": ", name, " must be on the CPU, got ",
                      slots->device());
  }
  const int64_t heads = std::max(source.size(1), target.size(1));
  for (const auto& [name, pages] : {std::pair{"source", &source}, {"target", &target}}) {
    TORCH_CHECK_VALUE(pages->size(1) == heads || (pages->size(1) == 1 && from.size(0) == heads),
                      kTransfer, ": ", name, " must have ", heads,
                      " KV heads, or one and a row of slots for each, got ", pages->size(1),
                      " and ", from.size(0), " rows");
  }
  TORCH_CHECK_VALUE(from.size(0) == 1 || from.size(0) == heads, kTransfer,
                    ": source_slots must have one row for all KV heads or one for each of ", heads,
                    ", got ", from.size(0));
}

int64_t checked_slot(const char* name, int32_t slot, int64_t count) {
  check_range(kTransfer, name, slot, -1, count - 1);
  return slot;
}

SummaryEncoder rows_of(const at::Tensor& source, const at::Tensor& target, const at::Tensor& from,
                       const at::Tensor& to) {
  const int64_t tables = from.size(0), count = from.size(1);
  const bool is_whole = tables == 1;
  const int64_t source_heads = is_whole ? 1 : source.size(1);
  const int64_t target_heads = is_whole ? 1 : target.size(1);
  SummaryEncoder rows{source.contiguous().view({source.size(0) * source_heads, -1}),
                      target.view({target.size(0) * target_heads, -1}),
                      {},
                      {}};
  std::vector<bool> is_written(rows.target.size(0));
  const at::Tensor source_slots = from.contiguous(), target_slots = to.contiguous();
  for (int64_t i = 0; i < tables * count; ++i) {
    const int64_t read =
        checked_slot("source_slots", source_slots.const_data_ptr<int32_t>()[i], source.size(0));
    const int64_t written =
        checked_slot("target_slots", target_slots.const_data_ptr<int32_t>()[i], target.size(0));
    if (read < 0 || written < 0) continue;
    const int64_t head = i / count;
    const int64_t row = written * target_heads + (target_heads == 1 ? 0 : head);
    TORCH_CHECK_VALUE(!is_written[row], kTransfer, ": target_slots must name each slot once, got ",
                      written, " twice");
    is_written[row] = true;
    rows.from.push_back(read * source_heads + (source_heads == 1 ? 0 : head));
    rows.to.push_back(row);
  }
  return rows;
}

/// [count] on the host, of a vector that outlives it.
at::Tensor indices(std::vector<int64_t>& numbers) {
  return at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kLong);
}

/// to[i] of target = from[i] of source, both on the host; `to` null: i itself.
void copy_rows(const at::Tensor& source, const at::Tensor& target, const std::vector<int64_t>& from,
               const int64_t* to) {
  const int64_t bytes = source.size(1) * source.element_size();
  const auto* read = static_cast<const char*>(source.const_data_ptr());
  auto* written = static_cast<char*>(target.data_ptr());
  run_parallel(torch_execution(), static_cast<int64_t>(from.size()), kPieceRows,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   std::memcpy(written + (to ? to[i] : i) * bytes, read + from[i] * bytes, bytes);
                 }
               });
}

/// Between the host's memory and a device's all rows go in one piece, whatever slots they are of.
void transfer_records(const at::Tensor& source, at::Tensor& target, const at::Tensor& source_slots,
                      const at::Tensor& target_slots) {
  check_transfer(source, target, source_slots, target_slots);
  SummaryEncoder rows = rows_of(source, target, source_slots, target_slots);
  if (rows.from.empty() || rows.source.size(1) == 0) return;
  if (source.is_cpu() && target.is_cpu()) {
    return copy_rows(rows.source, rows.target, rows.from, rows.to.data());
  }
  at::Tensor piece;
  if (source.is_cpu()) {
    piece = at::empty({static_cast<int64_t>(rows.from.size()), rows.source.size(1)},
                      source.options().pinned_memory(target.is_cuda()));
    copy_rows(rows.source, piece, rows.from, nullptr);
  } else {
    piece = rows.source.index_select(0, indices(rows.from).to(source.device()));
  }
  rows.target.index_copy_(0, indices(rows.to).to(target.device()), piece.to(target.device()));
}

struct Sides {
  RecordShape shape;
  int64_t count;
};

Sides sides_of(const char* where, const char* name, const at::Tensor& records) {
  TORCH_CHECK_VALUE(records.dim() >= 4 && records.size(-3) == 2, where, ": ", name,
                    " must be [..., kv_heads, 2, group_tokens, head_dim], got ", records.sizes());
  const RecordShape shape{records.size(-4), records.size(-2), records.size(-1), 0};
  int64_t count = 1;
  for (int64_t i = 0; i + 4 < records.dim(); ++i) count *= records.size(i);
  return {shape, count};
}

/// Each record's address.
std::vector<char*> addresses_of(const at::Tensor& records, int64_t count) {
  std::vector<char*> found(count);
  const int64_t bytes = count == 0 ? 0 : records.numel() / count * records.element_size();
  for (int64_t i = 0; i < count; ++i) {
    found[i] = static_cast<char*>(records.data_ptr()) + i * bytes;
  }
  return found;
}

void run_codec(void (*codec)(const RecordCodecArgs&, const Execution&), const Sides& sides,
               at::ScalarType dtype, const at::Tensor& from, const at::Tensor& to,
               const at::Tensor& exponents) {
  RecordShape shape = sides.shape;
  shape.element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  if (from.numel() == 0) {
    exponents.zero_();
    return;
  }
  const std::vector<char*> sources = addresses_of(from, sides.count);
  const std::vector<char*> targets = addresses_of(to, sides.count);
  codec({.shape = shape,
         .dtype = to_dtype(dtype),
         .from = reinterpret_cast<const void* const*>(sources.data()),
         .to = reinterpret_cast<void* const*>(targets.data()),
         .exponents = exponents.data_ptr<int8_t>(),
         .count = sides.count},
        torch_execution());
}

std::tuple<at::Tensor, at::Tensor> encode_records_cpu(const at::Tensor& records) {
  const Sides sides = sides_of("encode_records", "records", records);
  check_floating("encode_records", "records", records.scalar_type());
  const at::Tensor source = records.contiguous();
  at::Tensor encoded = at::empty(records.sizes(), records.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor exponents =
      at::empty(records.sizes().slice(0, records.dim() - 2), records.options().dtype(at::kChar));
  run_codec(encode_records, sides, records.scalar_type(), source, encoded, exponents);
  return {encoded, exponents};
}

at::Tensor decode_records_cpu(const at::Tensor& encoded, const at::Tensor& exponents,
                              at::ScalarType dtype) {
  check_dtype("decode_records", "encoded", encoded, at::kFloat8_e4m3fn);
  const Sides sides = sides_of("decode_records", "encoded", encoded);
  check_dtype("decode_records", "exponents", exponents, at::kChar);
  check_shape("decode_records", "exponents", exponents, "[..., kv_heads, 2]",
              encoded.sizes().slice(0, encoded.dim() - 2));
  check_floating("decode_records", "dtype", dtype);
  at::Tensor records = at::empty(encoded.sizes(), encoded.options().dtype(dtype));
  const at::Tensor source = encoded.contiguous();
  if (source.numel() == 0) return records;
  const at::Tensor read = exponents.contiguous();
  const auto [low, high] = dtype == at::kHalf ? std::pair{-15, 7} : std::pair{-117, 119};
  check_range("decode_records", "exponents", read.min().item<int8_t>(), low, high);
  check_range("decode_records", "exponents", read.max().item<int8_t>(), low, high);
  run_codec(decode_records, sides, dtype, source, records, read);
  return records;
}

Int4Shape int4_shape(const char* where, RecordShape record, at::ScalarType dtype) {
  check_floating(where, "dtype", dtype);
  TORCH_CHECK_VALUE(record.head_dim > 0 && record.head_dim % kInt4HeadUnit == 0, where,
                    ": head_dim must be a multiple of ", kInt4HeadUnit, ", got ", record.head_dim);
  check_range(where, "group_tokens", record.group_tokens, 1, kGroupTokensMax);
  record.element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  return {record, to_dtype(dtype)};
}

/// Of `count` records of contiguous tensors.
void run_int4(void (*codec)(const Int4Shape&, const std::byte*, std::byte*), const Int4Shape& shape,
              int64_t count, const at::Tensor& from, const at::Tensor& to) {
  const std::vector<char*> sources = addresses_of(from, count);
  const std::vector<char*> targets = addresses_of(to, count);
  at_parallel_for()(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      codec(shape, reinterpret_cast<const std::byte*>(sources[i]),
            reinterpret_cast<std::byte*>(targets[i]));
    }
  });
}

at::Tensor encode_int4_records_cpu(const at::Tensor& records) {
  const Sides sides = sides_of("encode_int4_records", "records", records);
  const Int4Shape shape = int4_shape("encode_int4_records", sides.shape, records.scalar_type());
  const at::Tensor source = records.contiguous();
  std::vector<int64_t> sizes = records.sizes().slice(0, records.dim() - 3).vec();
  sizes.push_back(shape.head_bytes());
  at::Tensor encoded = at::empty(sizes, records.options().dtype(at::kByte));
  run_int4(encode_int4_record, shape, sides.count, source, encoded);
  return encoded;
}

at::Tensor decode_int4_records_cpu(const at::Tensor& encoded, int64_t group_tokens,
                                   int64_t head_dim, at::ScalarType dtype) {
  constexpr const char* kWhere = "decode_int4_records";
  check_dtype(kWhere, "encoded", encoded, at::kByte);
  TORCH_CHECK_VALUE(encoded.dim() >= 2, kWhere, ": encoded must be [..., kv_heads, bytes], got ",
                    encoded.sizes());
  const Int4Shape shape = int4_shape(kWhere, {encoded.size(-2), group_tokens, head_dim, 0}, dtype);
  const int64_t bytes = shape.head_bytes();
  TORCH_CHECK_VALUE(encoded.size(-1) == bytes, kWhere, ": encoded must have ", bytes,
                    " bytes for each KV head of ", group_tokens, " tokens of ", head_dim, ", got ",
                    encoded.size(-1));
  std::vector<int64_t> sizes = encoded.sizes().slice(0, encoded.dim() - 1).vec();
  sizes.insert(sizes.end(), {2, group_tokens, head_dim});
  at::Tensor records = at::empty(sizes, encoded.options().dtype(dtype));
  const at::Tensor source = encoded.contiguous();
  const int64_t count = encoded.numel() / std::max<int64_t>(1, encoded.size(-2) * bytes);
  run_int4(decode_int4_record, shape, count, source, records);
  return records;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) {
  library.impl("encode_int4_records", encode_int4_records_cpu);
  library.impl("decode_int4_records", decode_int4_records_cpu);
  library.impl("encode_records", encode_records_cpu);
  library.impl("decode_records", decode_records_cpu);
}

TORCH_LIBRARY_IMPL(kvswap_torch, CompositeExplicitAutograd, library) {
  library.impl("transfer_records", transfer_records);
}

}  // namespace kvswap
