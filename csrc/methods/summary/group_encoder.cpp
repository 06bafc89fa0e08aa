#include "methods/summary/group_encoder.h"

namespace kvswap {

std::vector<uint64_t> masks_of(const SummarySlice& piece, int64_t group_tokens) {
  std::vector<uint64_t> masks;
  if (piece.counted) return {*piece.counted};
  if (piece.valid == nullptr || piece.valid->all_valid_from() <= piece.first_token) return masks;
  for (int64_t token = 0; token < piece.tokens; token += group_tokens) {
    masks.push_back(piece.valid->mask(piece.first_token + token, group_tokens));
  }
  return masks;
}

void GroupEncoder::write(int64_t, const SummarySlice& piece) const {
  const std::vector<uint64_t> masks = masks_of(piece, options_.group_tokens);
  summarize_groups({.keys = piece.keys.data,
                    .head_stride = piece.keys.head_stride,
                    .token_stride = piece.keys.token_stride,
                    .valid = masks.empty() ? nullptr : masks.data(),
                    .summary = piece.rows,
                    .row_scale = piece.row_scale,
                    .first_row = piece.first_row,
                    .groups = piece.tokens / options_.group_tokens,
                    .group_tokens = options_.group_tokens,
                    .kv_heads = options_.kv_heads,
                    .head_dim = options_.head_dim,
                    .row = row_,
                    .key_dtype = piece.keys.dtype,
                    .summary_dtype = options_.summary_dtype});
}

/// All heads of a row of [batch, queries].
AskGroupsArgs GroupEncoder::asking(const QueryView& query, int64_t row) const {
  return {.query = query.at(row / query.queries, 0, row % query.queries),
          .head_stride = query.head_stride,
          .heads = query.heads,
          .last_head = query.heads,
          .kv_heads = options_.kv_heads,
          .head_dim = options_.head_dim,
          .row = row_,
          .weight = static_cast<float>(options_.bound_weight),
          .dtype = query.dtype};
}

void GroupEncoder::ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const {
  const int64_t width = shape(layer).width;
  for (int64_t row = 0; row < batch * query.queries; ++row) {
    AskGroupsArgs args = asking(query, row);
    args.asked = asked + row * width;
    ask_groups(args);
  }
}

void GroupEncoder::ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                                 float* asked) const {
  const int64_t width = shape(layer).width;
  for (int64_t i = 0; i < batch * query.queries * query.heads; ++i) {
    AskGroupsArgs args = asking(query, i / query.heads);
    args.first_head = i % query.heads;
    args.last_head = args.first_head + 1;
    args.scale = scale;
    args.asked = asked + i * width;
    ask_groups(args);
  }
}

}  // namespace kvswap
