#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/moves.cuh"

namespace kvswap::cuda {
namespace {

enum class Direction { kPack, kUnpack };

/// Lengths and strides in vectors.
template <typename Vector>
struct TransferJob {
  Vector* keys = nullptr;
  Vector* values = nullptr;
  int64_t key_batch_stride = 0, key_head_stride = 0, key_token_stride = 0;
  int64_t value_batch_stride = 0, value_head_stride = 0, value_token_stride = 0;
  void* const* records = nullptr;
  const int32_t* sequences = nullptr;
  const int64_t* first_tokens = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* lengths = nullptr;
  uint32_t units = 0;  // count * kv_heads * 2
  uint32_t kv_heads = 0;
  uint32_t heads_apart = 1;
  int group_tokens = 0;
  int row = 0;  // vectors of one token and head
};

/// Rows that are contiguous on one side and stand `stride` apart on the other.
template <Direction kDirection, typename Vector>
__device__ void move_rows(Vector* rows, int64_t stride, Vector* record, int count, int row,
                          int lane) {
  const int vectors = count * row;
  const auto place = [&](int i) { return i / row * stride + i % row; };
  int i = lane;
  for (; i + (kMoveUnroll - 1) * 32 < vectors; i += kMoveUnroll * 32) {
    Vector held[kMoveUnroll];
#pragma unroll
    for (int u = 0; u < kMoveUnroll; ++u) {
      const int at = i + u * 32;
      held[u] = kDirection == Direction::kPack ? rows[place(at)] : record[at];
    }
#pragma unroll
    for (int u = 0; u < kMoveUnroll; ++u) {
      const int at = i + u * 32;
      (kDirection == Direction::kPack ? record[at] : rows[place(at)]) = held[u];
    }
  }
  for (; i < vectors; i += 32) {
    if constexpr (kDirection == Direction::kPack) {
      record[i] = rows[place(i)];
    } else {
      rows[place(i)] = record[i];
    }
  }
}

/// A warp moves K or V of one head of one record.
template <Direction kDirection, typename Vector>
__global__ void __launch_bounds__(kMoveThreads) transfer_records(TransferJob<Vector> job) {
  const uint32_t unit = warp_unit();
  if (unit >= job.units) return;
  const bool is_value = unit % 2 != 0;
  const uint32_t head = unit / 2 % job.kv_heads;
  const uint32_t i = unit / 2 / job.kv_heads;
  const uint32_t sequence = job.sequences ? static_cast<uint32_t>(job.sequences[i]) : 0;
  const int64_t row = sequence / job.heads_apart;
  const int64_t first_head = sequence % job.heads_apart;
  const int length = job.lengths ? job.lengths[i] : job.group_tokens;
  const int64_t slot = job.slots ? job.slots[i] : 0;
  const int64_t batch_stride = is_value ? job.value_batch_stride : job.key_batch_stride;
  const int64_t head_stride = is_value ? job.value_head_stride : job.key_head_stride;
  const int64_t token_stride = is_value ? job.value_token_stride : job.key_token_stride;
  Vector* rows = (is_value ? job.values : job.keys) + row * batch_stride +
                 (first_head + head) * head_stride + job.first_tokens[i] * token_stride;
  Vector* record = static_cast<Vector*>(job.records[i]) +
                   (int64_t{2 * head + is_value} * job.group_tokens + slot) * job.row;
  move_rows<kDirection>(rows, token_stride, record, length, job.row,
                        static_cast<int>(threadIdx.x) % 32);
}

template <Direction kDirection, typename Vector>
Status transfer_by(const char* where, const BatchTransferArgs& args, void* stream) {
  const auto vectors = [&](int64_t elements) {
    return elements * args.shape.element_bytes / static_cast<int64_t>(sizeof(Vector));
  };
  TransferJob<Vector> job;
  job.keys = static_cast<Vector*>(args.tokens.keys);
  job.values = static_cast<Vector*>(args.tokens.values);
  job.key_batch_stride = vectors(args.key_batch_stride);
  job.key_head_stride = vectors(args.tokens.key_head_stride);
  job.key_token_stride = vectors(args.tokens.key_token_stride);
  job.value_batch_stride = vectors(args.value_batch_stride);
  job.value_head_stride = vectors(args.tokens.value_head_stride);
  job.value_token_stride = vectors(args.tokens.value_token_stride);
  job.records = args.records;
  job.sequences = args.sequences;
  job.first_tokens = args.first_tokens;
  job.slots = args.slots;
  job.lengths = args.lengths;
  const int64_t units = args.count * args.shape.kv_heads * 2;
  KVSWAP_RETURN_IF_ERROR(check_units(where, units));
  job.units = static_cast<uint32_t>(units);
  job.kv_heads = static_cast<uint32_t>(args.shape.kv_heads);
  job.heads_apart = static_cast<uint32_t>(args.heads_apart);
  job.group_tokens = static_cast<int>(args.shape.group_tokens);
  job.row = static_cast<int>(vectors(args.shape.head_dim));
  return launch(where, stream, {.x = ceil_div(units, kMoveThreads / 32)}, kMoveThreads,
                transfer_records<kDirection, Vector>, job);
}

template <Direction kDirection>
Status transfer(const char* where, const BatchTransferArgs& args, void* stream) {
  if (args.shape.payload_bytes() == 0) return Status::ok();
  const TokenView& view = args.tokens;
  const uint64_t strides = args.key_batch_stride | args.value_batch_stride | view.key_head_stride |
                           view.key_token_stride | view.value_head_stride |
                           view.value_token_stride | args.shape.head_dim;
  const uint64_t addresses =
      reinterpret_cast<uintptr_t>(view.keys) | reinterpret_cast<uintptr_t>(view.values);
  return move_bytes(strides * args.shape.element_bytes | addresses) == 16
             ? transfer_by<kDirection, uint4>(where, args, stream)
             : transfer_by<kDirection, uint16_t>(where, args, stream);
}

struct CopyJob {
  const char* source = nullptr;
  int64_t source_stride = 0;
  const int64_t* source_offsets = nullptr;
  void* const* targets = nullptr;
  char* target = nullptr;
  int64_t target_stride = 0;
  uint32_t pieces = 0;  // of a record, a warp each
  uint32_t units = 0;   // count * pieces
  int64_t bytes = 0;
};

inline constexpr int64_t kCopyPieceBytes = 4096;

template <typename Vector>
__global__ void __launch_bounds__(kMoveThreads) scatter_records(CopyJob job) {
  const uint32_t unit = warp_unit();
  if (unit >= job.units) return;
  const uint32_t i = unit / job.pieces;
  const int64_t first = unit % job.pieces * kCopyPieceBytes;
  const int64_t bytes = job.bytes - first < kCopyPieceBytes ? job.bytes - first : kCopyPieceBytes;
  const char* source =
      job.source + (job.source_offsets ? job.source_offsets[i] : i * job.source_stride) + first;
  char* target =
      (job.targets ? static_cast<char*>(job.targets[i]) : job.target + i * job.target_stride) +
      first;
  copy_run(reinterpret_cast<Vector*>(target), reinterpret_cast<const Vector*>(source),
           static_cast<int>(bytes / static_cast<int64_t>(sizeof(Vector))),
           static_cast<int>(threadIdx.x) % 32);
}

}  // namespace

Status pack_records(const BatchTransferArgs& args, void* stream) {
  return transfer<Direction::kPack>("pack_records", args, stream);
}

Status unpack_records(const BatchTransferArgs& args, void* stream) {
  return transfer<Direction::kUnpack>("unpack_records", args, stream);
}

Status copy_records(const CopyRecordsArgs& args, void* stream) {
  CopyJob job;
  job.source = static_cast<const char*>(args.source);
  job.source_stride = args.source_stride;
  job.source_offsets = args.source_offsets;
  job.targets = args.targets;
  job.target = static_cast<char*>(args.target);
  job.target_stride = args.target_stride;
  job.bytes = args.bytes;
  const int64_t pieces = ceil_div(args.bytes, kCopyPieceBytes);
  KVSWAP_RETURN_IF_ERROR(check_units("copy_records", args.count * pieces));
  job.pieces = static_cast<uint32_t>(pieces);
  job.units = static_cast<uint32_t>(args.count * pieces);
  const Grid grid = {.x = ceil_div(args.count * pieces, kMoveThreads / 32)};
  // Offsets and pages stand on the device; the rules in kernels.h keep them to 16 bytes.
  const uint64_t bits = args.bytes | args.source_stride | args.target_stride |
                        reinterpret_cast<uintptr_t>(args.source) |
                        reinterpret_cast<uintptr_t>(args.target);
  return move_bytes(bits) == 16
             ? launch("copy_records", stream, grid, kMoveThreads, scatter_records<uint4>, job)
             : launch("copy_records", stream, grid, kMoveThreads, scatter_records<char>, job);
}

}  // namespace kvswap::cuda
