#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"

namespace kvswap {

/// New K and V of a layer: [batch, kv_heads, tokens, head_dim] and [batch, kv_heads, tokens,
/// value_width()], rows contiguous. Where KV heads are sequences of their own, sequence s is head
/// s % heads_apart of the arrays' s / heads_apart.
struct KeyValueView {
  const void* keys = nullptr;
  const void* values = nullptr;
  int64_t key_batch_stride = 0;  // elements, as all strides
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  int64_t value_batch_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;
  int64_t batch = 0;  // sequences
  int64_t tokens = 0;
  int64_t heads_apart = 1;

  /// The element where a sequence's keys begin.
  int64_t first_key(int64_t sequence) const {
    return sequence / heads_apart * key_batch_stride + sequence % heads_apart * key_head_stride;
  }
};

// The tail: the newest tokens of each layer, in pages of the sequences' rings
// (SequencePages::tail_page()): filled token by token, and read from there until their group is
// sealed.

struct TailPiece {
  int64_t first_token = 0;  // of the new tokens
  int64_t count = 0;
  int64_t first_position = 0;  // where they stand
};
void fill_tail(EngineContext& context, const Batch& batch, int64_t layer,
               const KeyValueView& tokens, const TailPiece& piece);

/// All sequences' tokens; which of them go where is left to fill in.
cuda::BatchTransferArgs transfer_of(const Plan& plan, const KeyValueView& tokens);

}  // namespace kvswap
