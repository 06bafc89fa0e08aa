#pragma once

// What both kernels of chunk attention walk over: blocks of tokens, and tiles of rows that meet
// them. A row is one query of one head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "kernels/chunk_attention.h"

namespace kvswap::chunk {

inline constexpr int64_t kTileRows = 6;      // whose sums fill registers with those of a block
inline constexpr int64_t kPieceRows = 1024;  // at least, so that what is laid out for it is little
inline constexpr int64_t kPiecesMax = 8;     // of a KV head
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();
inline constexpr float kLog2e = std::numbers::log2e_v<float>;

/// K (side 0) or V of a token, or null where it is padding.
template <typename T>
const T* token_of(const ChunkAttentionArgs& args, int64_t kv_head, int64_t side, int64_t t) {
  if (args.valid != nullptr && args.valid[t] == 0) return nullptr;
  const RecordShape& shape = args.shape;
  if (args.records != nullptr) {
    const int64_t first = kv_head * shape.head_elements() + side * shape.value_elements();
    const int64_t width = side == 0 ? shape.head_dim : shape.value_width();
    return static_cast<const T*>(args.records[t / shape.group_tokens]) + first +
           t % shape.group_tokens * width;
  }
  const TokenView& view = args.view;
  return side == 0 ? static_cast<const T*>(view.keys) + kv_head * view.key_head_stride +
                         t * view.key_token_stride
                   : static_cast<const T*>(view.values) + kv_head * view.value_head_stride +
                         t * view.value_token_stride;
}

/// Up to kTileRows rows, and what they come to.
struct SummaryEncoder {
  int64_t count = 0;                  // that are there
  const void* query[kTileRows] = {};  // [head_dim] of the dtype
  float* output[kTileRows] = {};      // [value_width]
  float* log_sum_exp[kTileRows] = {};
  int64_t seen[kTileRows] = {};     // tokens of the block, the first ones
  int64_t most = 0;                 // of `seen`
  float before[kTileRows] = {};     // log2 of what was attended before
  float base[kTileRows] = {};       // the block's largest score, which weights are relative to
  float old_share[kTileRows] = {};  // of what was attended before in what is now
  float new_share[kTileRows] = {};  // of a weight of the block
};

/// Those of a KV head from `row` on, before `tokens` tokens of which the first is at `position`.
inline SummaryEncoder rows_of(const ChunkAttentionArgs& args, int64_t kv_head, int64_t row,
                              int64_t position, int64_t tokens) {
  const int64_t heads = args.heads / args.shape.kv_heads;
  const int64_t bytes = dtype_bytes(args.dtype);
  SummaryEncoder rows;
  rows.count = std::min(kTileRows, args.queries * heads - row);
  std::fill_n(rows.before, kTileRows, kNothing);
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t query = (row + r) / heads;
    const int64_t head = kv_head * heads + (row + r) % heads;
    const int64_t to = query * args.heads + head;
    rows.query[r] = static_cast<const char*>(args.query) +
                    (head * args.query_head_stride + query * args.query_token_stride) * bytes;
    rows.output[r] = args.output + to * args.shape.value_width();
    rows.log_sum_exp[r] = args.log_sum_exp + to;
    rows.seen[r] = std::clamp<int64_t>(args.query_position + query - position + 1, 0, tokens);
    rows.before[r] = args.log_sum_exp[to] * kLog2e;
    rows.most = std::max(rows.most, rows.seen[r]);
  }
  return rows;
}

/// A row's largest score in the block is known. Weights are 2^(factor * (score - base)): a
/// difference first, since the exponents of large scores are rounded by more than a weight bears.
inline void refer(SummaryEncoder& rows, int64_t r, float largest) {
  rows.base[r] = largest == kNothing ? 0.0f : largest;
}

/// A row's weights in the block are summed up: its shares, and what it has attended now.
inline void settle(SummaryEncoder& rows, int64_t r, float factor, float added) {
  const bool is_nothing = added == 0.0f;
  const float exponent = factor * rows.base[r];
  const float reference = std::max(rows.before[r], exponent);
  const float kept = std::exp2(rows.before[r] - reference);
  const float gained = std::exp2(exponent - reference);
  const float all = kept + gained * added;
  rows.old_share[r] = is_nothing ? 1.0f : kept / all;
  rows.new_share[r] = is_nothing ? 0.0f : gained / all;
  if (is_nothing || r >= rows.count) return;
  *rows.log_sum_exp[r] = (reference + std::log2(all)) / kLog2e;
}

/// Pieces [begin, end) of a KV head. A piece is every `pieces`-th tile from its own on: causal rows
/// are then alike for all.
template <typename Attender>
void attend_pieces(Attender& attender, const ChunkAttentionArgs& args, int64_t kv_head,
                   int64_t begin, int64_t end, int64_t pieces) {
  const int64_t rows = args.queries * (args.heads / args.shape.kv_heads);
  const int64_t newest = args.query_position + args.queries - 1;
  const int64_t block = attender.block_tokens();
  for (int64_t first = 0; first < args.tokens; first += block) {
    if (args.position + first > newest) return;
    const int64_t tokens = std::min(block, args.tokens - first);
    attender.lay_out(kv_head, first, tokens);
    for (int64_t tile = 0; tile * kTileRows < rows; ++tile) {
      if (tile % pieces < begin || tile % pieces >= end) continue;
      SummaryEncoder some = rows_of(args, kv_head, tile * kTileRows, args.position + first, tokens);
      if (some.most > 0) attender.attend(some);
    }
  }
}

/// All of it, an Attender for each thread's pieces: it lays out a block of tokens of one KV head,
/// once for as many as come after each other, then attends rows over that.
template <typename Attender>
void attend_all(const ChunkAttentionArgs& args, const Execution& execution) {
  const int64_t rows = args.queries * (args.heads / args.shape.kv_heads);
  const int64_t pieces = std::clamp<int64_t>(rows / kPieceRows, 1, kPiecesMax);
  run_parallel(execution, args.shape.kv_heads * pieces, 1, [&](int64_t begin, int64_t end) {
    Attender attender(args);
    while (begin < end) {
      const int64_t kv_head = begin / pieces;
      const int64_t last = std::min(end, (kv_head + 1) * pieces);
      attend_pieces(attender, args, kv_head, begin % pieces, last - kv_head * pieces, pieces);
      begin = last;
    }
  });
}

}  // namespace kvswap::chunk
