#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// A record holds `[kv_heads, sides, group_tokens, head_dim]`: each head's K, then its V, whose
/// rows may be narrower. With one side, K is the values too: what latent attention (MLA) caches.
/// Elements are moved as raw bytes of `element_bytes` (2 or 4).
struct RecordShape {
  int64_t kv_heads = 0;
  int64_t group_tokens = 0;
  int64_t head_dim = 0;
  int64_t element_bytes = 0;
  int64_t sides = 2;      // or 1
  int64_t value_dim = 0;  // of a row of V, at most head_dim; 0: as wide as K

  /// Elements of a token's V.
  int64_t value_width() const { return value_dim == 0 ? head_dim : value_dim; }
  /// Of a KV head's K, and of its V.
  int64_t side_elements(int64_t side) const {
    return group_tokens * (side == 0 ? head_dim : value_width());
  }
  int64_t payload_bytes() const { return kv_heads * head_elements() * element_bytes; }
  /// From one KV head's K to the next one's.
  int64_t head_elements() const { return side_elements(0) + (sides - 1) * side_elements(1); }
  /// From a KV head's K to its V.
  int64_t value_elements() const { return (sides - 1) * side_elements(0); }
};

/// K and V of one sequence and one layer as tensors see them: element (h, t, d) of K stands at
/// h * head_stride + t * token_stride + d. Covers HND ([heads, tokens, dim]) and NHD.
struct TokenView {
  void* keys = nullptr;
  void* values = nullptr;       // of records with one side not packed; null: not unpacked either
  int64_t key_head_stride = 0;  // elements, as all strides
  int64_t key_token_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;
};

struct TransferArgs {
  RecordShape shape = {};
  TokenView tokens = {};
  void* const* records = nullptr;         // [count] base of each record (or page)
  const int64_t* first_tokens = nullptr;  // [count] token of the view at which record i begins
  const int32_t* slots = nullptr;         // [count] slot in the record of that token; null: 0
  const int32_t* lengths = nullptr;       // [count] tokens to move; null: group_tokens
  int64_t count = 0;
};

/// Batched HND transfer: packs tokens of K and V tensors into records, many at once.
void pack_records(const TransferArgs& args);

/// The way back: scatters records to their tokens of K and V tensors.
void unpack_records(const TransferArgs& args);

}  // namespace kvswap
