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
/// A row is head_dim elements of one token, times an orthonormal Hadamard matrix of `block`
/// elements at a time: the largest of 64, 32 and 16 that divides head_dim. A coded row is one scale
/// for each block, [head_dim / block] bytes, then its levels, [head_dim / 2] bytes, the first half
/// of a block in the low four bits. Element = (level - 7.5) * scale, level 0..15, scale the largest
/// magnitude / 7.5, rounded up.
/// K: the coded mean of the rows that are finite, then each row's difference to what that stands
/// for, coded. V: each row, coded.
///
/// A scale is one byte: 0 is 0, 1..254 are 2^-20 to 2^11.6 in eight steps to the octave, 255 stands
/// for a block with infinities or NaN, all of which become NaN. Blocks beyond the largest scale
/// become its outer levels. The bytes are the same on every processor.
struct Int4Shape {
  RecordShape record = {};  // in dtype; two sides, head_dim a multiple of 16
  DType dtype = DType::kFloat32;

  int64_t block() const;
  int64_t row_bytes() const { return record.head_dim / block() + record.head_dim / 2; }
  /// Of a KV head of a coded record, and of all.
  int64_t head_bytes() const { return (2 * record.group_tokens + 1) * row_bytes(); }
  int64_t payload_bytes() const { return record.kv_heads * head_bytes(); }
};

/// What head_dim must be a multiple of.
inline constexpr int64_t kInt4HeadUnit = 16;

/// One record, to [shape.payload_bytes()]. The two must not overlap.
void encode_int4_record(const Int4Shape& shape, const std::byte* record, std::byte* coded);
/// The way back, to [shape.record.payload_bytes()].
void decode_int4_record(const Int4Shape& shape, const std::byte* coded, std::byte* record);

}  // namespace kvswap
