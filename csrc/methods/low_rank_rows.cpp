#include "methods/low_rank_rows.h"

#include <string>

#include "kernels/project.h"

namespace kvswap {

Status LowRankRows::set_projection(int64_t layer, int64_t rank, const float* keys,
                                   const float* queries) {
  const int64_t width = options_.heads_apart * options_.kv_heads * options_.head_dim;
  const int64_t bytes = width * rank * int64_t{sizeof(float)};
  Layer& target = layers_.at(layer);
  target = {};
  auto memory = memory_->allocate(2 * bytes);
  if (memory == nullptr) {
    return Status::budget("set_projection: " + std::to_string(2 * bytes) +
                          " bytes of memory must be available, and are not; lower rank");
  }
  memory_->upload(memory.get(), keys, bytes);
  memory_->upload(memory.get() + bytes, queries, bytes);
  target.rank = rank;
  target.projections = std::move(memory);
  return Status::ok();
}

int64_t LowRankRows::projection_bytes() const {
  int64_t floats = 0;
  for (const Layer& layer : layers_) {
    floats += 2 * options_.heads_apart * options_.kv_heads * options_.head_dim * layer.rank;
  }
  return floats * int64_t{sizeof(float)};
}

void LowRankRows::list(int64_t layer, std::vector<SavedTensor>& tensors) const {
  if (!is_ready(layer)) return;
  const int64_t width = options_.heads_apart * options_.kv_heads * options_.head_dim;
  const int64_t row_bytes = layers_[layer].rank * int64_t{sizeof(float)};
  for (const bool is_key : {true, false}) {
    const std::byte* from = layers_[layer].projections.get() + (is_key ? 0 : width * row_bytes);
    tensors.push_back(
        {.name = projection_name(layer, is_key),
         .dtype = "F32",
         .shape = {width, layers_[layer].rank},
         .row_bytes = row_bytes,
         .read = [this, from, row_bytes](int64_t first, int64_t count, std::byte* target) {
           return memory_->download(target, from + first * row_bytes, count * row_bytes);
         }});
  }
}

std::string projection_name(int64_t layer, bool is_key) {
  return "layers." + std::to_string(layer) + ".projection." + (is_key ? "key" : "query");
}

void LowRankRows::write(int64_t layer, const RowPiece& piece) const {
  project_keys({.keys = piece.keys.data,
                .head_stride = piece.keys.head_stride,
                .token_stride = piece.keys.token_stride,
                .projection = key_projection(layer, piece.sequence),
                .summary = piece.rows,
                .rest = piece.rest,
                .token_scale = piece.row_scale,
                .first_row = piece.first_row,
                .tokens = piece.tokens,
                .kv_heads = options_.kv_heads,
                .head_dim = options_.head_dim,
                .rank = layers_[layer].rank,
                .rest_rank = piece.rest_columns,
                .key_dtype = piece.keys.dtype,
                .summary_dtype = options_.summary_dtype});
}

void LowRankRows::ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const {
  const int64_t rank = layers_[layer].rank;
  for (int64_t row = 0; row < batch * query.queries; ++row) {
    project_query({.query = query.at(row / query.queries, 0, row % query.queries),
                   .head_stride = query.head_stride,
                   .projection = query_projection(layer, row / query.queries),
                   .projected = asked + row * rank,
                   .heads = query.heads,
                   .kv_heads = options_.kv_heads,
                   .head_dim = options_.head_dim,
                   .rank = rank,
                   .dtype = query.dtype});
  }
}

/// With the projection of the head's own KV head.
void LowRankRows::ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                                float* asked) const {
  const int64_t rank = layers_[layer].rank;
  const int64_t heads = query.heads;
  run_parallel({.parallel = options_.parallel}, batch * query.queries * heads, 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = i / heads;
                   const int64_t head = i % heads;
                   const int64_t kv_head = head / (heads / options_.kv_heads);
                   const float* projection = query_projection(layer, row / query.queries);
                   float* target = asked + i * rank;
                   project_query({.query = query.at(row / query.queries, head, row % query.queries),
                                  .projection = projection + kv_head * options_.head_dim * rank,
                                  .projected = target,
                                  .heads = 1,
                                  .kv_heads = 1,
                                  .head_dim = options_.head_dim,
                                  .rank = rank,
                                  .dtype = query.dtype});
                   for (int64_t r = 0; r < rank; ++r) target[r] *= scale;
                 }
               });
}

}  // namespace kvswap
