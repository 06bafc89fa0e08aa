#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// The newest queries of a chunk over the chunk's own keys. Strides are in elements; head_dim is
/// contiguous.
struct ObserveKeysArgs {
  const void* query = nullptr;  // [batch, heads, queries, head_dim]
  int64_t query_batch_stride = 0;
  int64_t query_head_stride = 0;
  int64_t query_token_stride = 0;
  const void* keys = nullptr;  // [batch, kv_heads, tokens, head_dim]
  int64_t key_batch_stride = 0;
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  const uint64_t* valid = nullptr;  // [batch, ceil(tokens / 64)]: bit t: token t counts; null: all
  /// [batch, heads, queries]: of all that a query attends, earlier chunks too; null: of these keys.
  const float* log_sum_exp = nullptr;
  float* mean = nullptr;    // [batch, kv_heads, tokens] out
  float* square = nullptr;  // the same; null: not wanted
  int64_t batch = 0;
  int64_t heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t queries = 0;  // at most tokens
  int64_t tokens = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // as PagedAttentionArgs'
  DType dtype = DType::kFloat32;
};

/// attention_mass() of a prompt, while its keys are at hand: query i stands at token
/// tokens - queries + i and sees no later one (SnapKV's window, PRKV 3.4, ARKV 3.2).
///
/// For who has the chunk's keys at hand: keepers of a plug-in. The engine does not call it. A turn
/// comes with the step after the chunk, by the queries that a crop has left, over all that is kept
/// or on disk, as it was rounded there: its keys are pages by then, which attention_mass() reads.
void observe_keys(const ObserveKeysArgs& args, const Execution& execution);

}  // namespace kvswap
