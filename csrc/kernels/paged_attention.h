#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/record_codec.h"
#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

inline constexpr int64_t kChunkQueriesMax = 16;

/// Decode attention over pages. A page has the byte order of a record.
struct PagedAttentionArgs {
  const void* query = nullptr;     // [batch, heads, queries, head_dim], strides below
  int64_t query_batch_stride = 0;  // elements; head_dim is contiguous
  int64_t query_head_stride = 0;
  int64_t query_token_stride = 0;
  void* output = nullptr;                // [batch, queries, heads, value_width()] contiguous
  float* log_sum_exp = nullptr;          // [batch, heads, queries]; null: not wanted
  const void* const* pages = nullptr;    // [batch, table_heads, pages_max]: base of each page
  const uint64_t* masks = nullptr;       // [batch, table_heads, pages_max]: bit t: token t counts
  const int32_t* positions = nullptr;    // [batch, table_heads, pages_max]: position of token 0
  const int32_t* page_counts = nullptr;  // [batch, table_heads]
  const int32_t* query_positions = nullptr;  // [batch]: position of query 0; query i stands i later
  /// [batch, table_heads, pages_max, shape.kv_heads, 2]: of pages in e4m3, as encode_records()
  /// makes them; kNotFloat8 in those of dtype. Null: all are of dtype.
  const int8_t* exponents = nullptr;
  int64_t pages_max = 0;
  int64_t table_heads = 1;  // 1: one table for all KV heads; else one for each
  int64_t batch = 0;
  int64_t heads = 0;    // a multiple of kv_heads()
  int64_t queries = 0;  // 1..kChunkQueriesMax
  float scale = 1.0f;
  float softcap = 0.0f;          // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks = nullptr;  // [heads]: a score beside the tokens', without a value; or null
  RecordShape shape = {};        // shape.kv_heads: heads in a page, all of them or one
  DType dtype = DType::kFloat32;

  /// The model's KV heads. A page holds all of them, at their places in the record, or one alone,
  /// which takes a table for each.
  int64_t kv_heads() const { return std::max(shape.kv_heads, table_heads); }
};

/// softmax(scale * Q K^T) V over the valid tokens of the pages, exactly, in fp32 inside. Gemma 2
/// caps the scores, gpt-oss learns a sink for each head, which takes weight and adds nothing.
///
/// Token t of page p is seen by query i iff its mask bit is set and positions[p] + t <=
/// query_positions[b] + i: causal within the chunk. A query that sees nothing gets zeros and a
/// log-sum-exp of -inf, or of its sink; a page whose mask is 0 may be null. Work is split over
/// batch x KV heads, and over pages where that is too little for the threads, merged by log-sum-exp
/// in a fixed order, so that the result does not depend on the number of threads. A page in e4m3
/// counts as what decode_records() makes of it. A number that is NaN, and a score of +inf that is
/// not capped, gives NaN.
void paged_attention(const PagedAttentionArgs& args, const Execution& execution);

}  // namespace kvswap
