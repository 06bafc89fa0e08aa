#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvswap/model_shape.h"

namespace kvswap {

// What a program hands a Cache for one layer, on raw pointers where the cache's device is. Strides
// are in elements; rows of head_dim are contiguous, as those of value_width() of V.

/// K and V of new tokens, [batch, kv_heads, tokens, head_dim] of the cache's dtype and [batch,
/// kv_heads, tokens, value_width()].
struct NewTokens {
  const void* keys = nullptr;  // after RoPE
  const void* values = nullptr;
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t key_batch_stride = 0;
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  int64_t value_batch_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;

  /// Contiguous arrays.
  static NewTokens packed(const void* keys, const void* values, const ModelShape& shape,
                          int64_t batch, int64_t tokens);
};

/// Which of the positions that a pass brings count; those of padding do not.
struct NewPositions {
  int64_t batch = 0;
  int64_t tokens = 0;
  // [batch, tokens], true where the token counts; null: all do, but those that an earlier call said
  // of the same positions do not
  const bool* valid = nullptr;
};

/// Which of the positions that a cache holds count.
struct HeldPositions {
  int64_t batch = 0;
  int64_t positions = 0;
  const bool* valid = nullptr;  // [batch, positions]
};

/// Queries of a layer, [batch, heads, tokens, head_dim] of the cache's dtype, after RoPE.
struct Queries {
  const void* data = nullptr;
  int64_t batch = 0;  // compared with the cache's; 0: not said
  int64_t heads = 0;  // look_ahead() also takes kv_heads: the sum over each KV head's query heads
  int64_t tokens = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  /// A contiguous array.
  static Queries packed(const void* data, int64_t heads, int64_t tokens, int64_t head_dim);
};

/// What attention does to its scores beside scaling them: Gemma 2 caps them, gpt-oss has sinks.
struct CapAndSinks {
  float softcap = 0;             // score = softcap * tanh(score / softcap); 0: not capped
  const float* sinks = nullptr;  // [heads], a score each beside the tokens', without a value
};

/// With rows=given: what the layer's sealed groups are worth to its next look_ahead() or attend().
/// The best are attended, the lower number first among equals; -inf: never.
struct GroupScores {
  std::span<const float> scores;  // [batch, queries, groups]; heads=each: [batch * kv_heads, ...]
  int64_t queries = 1;
};

/// With keeper=given, after each append(): what the layer's newest tokens are worth to be kept. The
/// best stay, the earlier one first among equals; -inf: never.
struct TokenImportance {
  std::span<const float> worth;       // [batch, tokens]; heads=each: [batch * kv_heads, tokens]
  std::span<const float> decay = {};  // what they lose with each later token: as worth, or empty
  enum class Of {
    kNewest,
    kAll,  // what all tokens are worth now, in the place of what was given; later ones decay it
  };
  Of of = Of::kNewest;
};

/// A layer's next choice, for oracles, recorded choices and measurements. The cache's own is made
/// all the same, so that its cost stays; groups that are not sealed or attended anyway (sinks) are
/// left out. At most pages_max a sequence.
struct GroupChoice {
  std::vector<std::vector<int64_t>> groups;  // [batch][...]; heads=each: [batch * kv_heads][...]
  // With look_ahead=verify, of the prediction for it, as groups; empty: what its query chooses.
  std::vector<std::vector<int64_t>> predicted = {};
};

/// What a layer's next attend() of one query sees, of what its choice of groups has in memory:
/// these tokens and no other. For a model whose own index says which tokens it attends.
struct TokenChoice {
  std::vector<std::vector<int64_t>> positions;  // [batch][...]; heads=each: [batch * kv_heads][...]
};

}  // namespace kvswap
