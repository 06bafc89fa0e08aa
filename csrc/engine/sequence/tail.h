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

/// The newest tokens of each layer, in pages of the sequences' rings: filled token by token, and
/// read from there until their group is sealed. Not thread-safe.
class Tail {
 public:
  Tail(EngineContext& context, Batch& batch) : context_(context), batch_(batch) {}

  struct Piece {
    int64_t first_token = 0;  // of the new tokens
    int64_t count = 0;
    int64_t first_position = 0;  // where they stand
  };
  void fill(int64_t layer, const KeyValueView& tokens, const Piece& piece);
  /// A group that comes back: its tokens in the model's dtype, in the host's memory.
  Status put_back(int64_t layer, int64_t sequence, int64_t group, const std::byte* tokens);
  /// The page of a group that is not sealed yet.
  std::byte* page(int64_t layer, int64_t sequence, int64_t group) const;

 private:
  EngineContext& context_;
  Batch& batch_;
};

/// All sequences' tokens; which of them go where is left to fill in.
cuda::BatchTransferArgs transfer_of(const Plan& plan, const KeyValueView& tokens);

}  // namespace kvswap
