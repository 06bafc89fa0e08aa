#include "kernels/records.h"

#include <cstring>

namespace kvswap {
namespace {

enum class Direction { kPack, kUnpack };

/// A compile-time size turns the copy of one token's row into a few vector moves.
template <Direction kDirection, int64_t kRowBytes>
void copy_rows(char* rows, int64_t stride_bytes, char* record, int64_t count, int64_t row_bytes) {
  const int64_t size = kRowBytes ? kRowBytes : row_bytes;
  for (int64_t row = 0; row < count; ++row) {
    if constexpr (kDirection == Direction::kPack) {
      std::memcpy(record + row * size, rows + row * stride_bytes, size);
    } else {
      std::memcpy(rows + row * stride_bytes, record + row * size, size);
    }
  }
}

template <Direction kDirection>
void copy_tokens(char* rows, int64_t stride_bytes, char* record, int64_t count, int64_t row_bytes) {
  if (stride_bytes == row_bytes) {
    return copy_rows<kDirection, 0>(rows, stride_bytes, record, 1, count * row_bytes);
  }
  switch (row_bytes) {
    case 128:
      return copy_rows<kDirection, 128>(rows, stride_bytes, record, count, row_bytes);
    case 256:
      return copy_rows<kDirection, 256>(rows, stride_bytes, record, count, row_bytes);
    case 512:
      return copy_rows<kDirection, 512>(rows, stride_bytes, record, count, row_bytes);
    default:
      return copy_rows<kDirection, 0>(rows, stride_bytes, record, count, row_bytes);
  }
}

template <Direction kDirection>
void transfer(const TransferArgs& args) {
  const RecordShape& shape = args.shape;
  const TokenView& view = args.tokens;
  const int64_t key_row = shape.head_dim * shape.element_bytes;
  const int64_t value_row = shape.value_width() * shape.element_bytes;
  const int64_t head_bytes = shape.head_elements() * shape.element_bytes;
  const int64_t value_bytes = shape.value_elements() * shape.element_bytes;
  const bool has_values =
      shape.sides == 2 || (kDirection == Direction::kUnpack && view.values != nullptr);
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t length = args.lengths ? args.lengths[i] : shape.group_tokens;
    const int64_t first = args.first_tokens[i];
    const int64_t slot = args.slots ? args.slots[i] : 0;
    char* record = static_cast<char*>(args.records[i]);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int64_t key = head * view.key_head_stride + first * view.key_token_stride;
      const int64_t value = head * view.value_head_stride + first * view.value_token_stride;
      copy_tokens<kDirection>(static_cast<char*>(view.keys) + key * shape.element_bytes,
                              view.key_token_stride * shape.element_bytes,
                              record + head * head_bytes + slot * key_row, length, key_row);
      if (!has_values) continue;
      copy_tokens<kDirection>(static_cast<char*>(view.values) + value * shape.element_bytes,
                              view.value_token_stride * shape.element_bytes,
                              record + head * head_bytes + value_bytes + slot * value_row, length,
                              value_row);
    }
  }
}

}  // namespace

void pack_records(const TransferArgs& args) { transfer<Direction::kPack>(args); }

void unpack_records(const TransferArgs& args) { transfer<Direction::kUnpack>(args); }

}  // namespace kvswap
