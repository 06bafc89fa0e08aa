#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// What stands for a group's keys: of every channel one number or two.
enum class GroupRow : int8_t {
  kBox,   ///< [middles, half widths] of the box around them (Quest 3.2)
  kMean,  ///< their mean (ShadowKV 4.1)
};

/// Numbers of a channel.
constexpr int64_t numbers_of(GroupRow row) { return row == GroupRow::kBox ? 2 : 1; }

struct SummarizeGroupsArgs {
  const void* keys = nullptr;       // [kv_heads, groups * group_tokens, head_dim], strides below
  int64_t head_stride = 0;          // elements
  int64_t token_stride = 0;         // elements; head_dim is contiguous
  const uint64_t* valid = nullptr;  // [groups]: bit t: token t counts; null: all do
  void* summary = nullptr;          // [blocks, width, 16]: rows first_row.. are written
  float* row_scale = nullptr;       // [blocks, 16]: int8 only
  int64_t first_row = 0;
  int64_t groups = 0;
  int64_t group_tokens = 0;  // 1..64
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  GroupRow row = GroupRow::kBox;
  DType key_dtype = DType::kFloat32;
  DType summary_dtype = DType::kFloat32;  // no int4
};

/// A row for each group, [kv_heads * head_dim] of the first number of its channels, then of the
/// second, in the blocked layout of a summary.
///
/// Half widths are rounded up, and cover what rounding does to the middle: a box holds its keys at
/// any precision. A group with a key that is not finite has the largest box; a mean that is not
/// finite is NaN, as is an int8 row's scale. Of a group of which no token counts all is 0.
void summarize_groups(const SummarizeGroupsArgs& args);

struct AskGroupsArgs {
  const void* query = nullptr;  // [heads, head_dim] with head_stride; dtype
  int64_t head_stride = 0;      // elements
  float* asked = nullptr;       // [width] out
  int64_t heads = 0;            // a multiple of kv_heads
  int64_t first_head = 0;       // those that ask: [first_head, last_head)
  int64_t last_head = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  GroupRow row = GroupRow::kBox;
  float scale = 1.0f;   // of the query
  float weight = 1.0f;  // of half widths
  DType dtype = DType::kFloat32;
};

/// What meets a row, each head at its KV head's channels: the heads' sum of q, of boxes beside it
/// `weight` times their sum of |q|. With a weight of 1 the product is the sum over heads of the
/// largest that a key in the box can have.
void ask_groups(const AskGroupsArgs& args);

}  // namespace kvswap
