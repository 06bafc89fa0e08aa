#pragma once

#include <cstdint>

#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

/// What the queries of a long chunk have attended so far, and more tokens for them.
struct ChunkAttentionArgs {
  const void* query = nullptr;    // [heads, queries, head_dim], strides below
  int64_t query_head_stride = 0;  // elements, as all strides; head_dim is contiguous
  int64_t query_token_stride = 0;
  float* output = nullptr;               // [queries, heads, value_width()] in and out
  float* log_sum_exp = nullptr;          // [queries, heads] in and out; -inf: nothing so far
  const void* const* records = nullptr;  // [ceil(tokens / group_tokens)]; null: `view` has them
  TokenView view = {};                   // only read
  const uint8_t* valid = nullptr;        // [tokens]: 0 for padding; null: all count
  int64_t tokens = 0;
  int64_t position = 0;        // of token 0; token t stands t later
  int64_t query_position = 0;  // of query 0; query i sees what stands at its position or before
  int64_t heads = 0;           // a multiple of shape.kv_heads
  int64_t queries = 0;
  float scale = 1.0f;             // positive
  float softcap = 0.0f;           // scores become softcap * tanh(score / softcap); 0: they stay
  RecordShape shape = {};         // group_tokens: of records only
  DType dtype = DType::kFloat32;  // of query and tokens: fp32, bf16 or fp16
};

/// Merges softmax(scale * Q K^T) V over the tokens into what was attended before, exactly, by a
/// running maximum and sum: in fp32, or with bf16 on a CPU that multiplies its pairs (AVX-512 BF16)
/// by such products with sums in fp32, weights rounded to bf16 before they meet V, as torch's flash
/// attention on the CPU does. Tokens are read as they lie, each once for all queries of its KV
/// head. Work is split over KV heads and rows; the result does not depend on how. A query that sees
/// nothing keeps what it has. A number that is NaN, and a score of +inf that is not capped, gives
/// NaN.
void chunk_attention(const ChunkAttentionArgs& args, const Execution& execution);

/// Whether the CPU multiplies whole tiles of bf16 (AMX), as other libraries do.
bool has_bf16_tiles();

}  // namespace kvswap
