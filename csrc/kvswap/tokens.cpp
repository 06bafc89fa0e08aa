#include "kvswap/tokens.h"

namespace kvswap {

NewTokens NewTokens::packed(const void* keys, const void* values, const ModelShape& shape,
                            int64_t batch, int64_t tokens) {
  const int64_t key_stride = tokens * shape.head_dim;
  const int64_t value_stride = tokens * shape.value_width();
  return {.keys = keys,
          .values = values,
          .batch = batch,
          .tokens = tokens,
          .key_batch_stride = shape.kv_heads * key_stride,
          .key_head_stride = key_stride,
          .key_token_stride = shape.head_dim,
          .value_batch_stride = shape.kv_heads * value_stride,
          .value_head_stride = value_stride,
          .value_token_stride = shape.value_width()};
}

Queries Queries::packed(const void* data, int64_t heads, int64_t tokens, int64_t head_dim) {
  return {.data = data,
          .heads = heads,
          .tokens = tokens,
          .batch_stride = heads * tokens * head_dim,
          .head_stride = tokens * head_dim,
          .token_stride = head_dim};
}

}  // namespace kvswap
