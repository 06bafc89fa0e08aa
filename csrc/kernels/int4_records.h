#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

/// Records of four bits an element, for what reads and writes cost: `[kv_heads]` of K, then V.
///
/// The idea of KIVI (keys have channels of their own range, values do not) with two changes, so
/// that a record stands for itself: what a channel has in common is the mean of the record's own
/// tokens, and each row is rotated first (QuaRot), which spreads what stands out in a row.
///
/// A row is the `width` elements of one token, of K or of V, times an orthonormal Hadamard matrix
/// of `block` elements at a time: the largest of 64, 32 and 16 that divides its width. A coded row
/// is one scale for each block, [width / block] bytes, then its levels, [width / 2] bytes, the
/// first half of a block in the low four bits. Element = (level - 7.5) * scale, level 0..15, scale
/// the largest magnitude / 7.5, rounded up. K: the coded mean of the rows that are finite, then
/// each row's difference to what that stands for, coded. V: each row, coded.
///
/// A scale is one byte: 0 is 0, 1..254 are 2^-20 to 2^11.6 in eight steps to the octave, 255 stands
/// for a block with infinities or NaN, all of which become NaN. Blocks beyond the largest scale
/// become its outer levels. The bytes are the same on every processor.
struct Int4Shape {
  RecordShape record = {};  // in dtype; two sides, their widths multiples of 16
  DType dtype = DType::kFloat32;

  static int64_t block_of(int64_t width);
  static int64_t row_bytes(int64_t width) { return width / block_of(width) + width / 2; }
  /// Of a KV head of a coded record, and of all.
  int64_t head_bytes() const {
    return (record.group_tokens + 1) * row_bytes(record.head_dim) +
           record.group_tokens * row_bytes(record.value_width());
  }
  int64_t payload_bytes() const { return record.kv_heads * head_bytes(); }
};

/// What the widths of K and V must be multiples of.
inline constexpr int64_t kInt4HeadUnit = 16;

/// One record, to [shape.payload_bytes()]. The two must not overlap.
void encode_int4_record(const Int4Shape& shape, const std::byte* record, std::byte* coded);
/// The way back, to [shape.record.payload_bytes()].
void decode_int4_record(const Int4Shape& shape, const std::byte* coded, std::byte* record);

}  // namespace kvswap
