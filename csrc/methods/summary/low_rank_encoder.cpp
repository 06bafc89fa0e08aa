#include "methods/summary/low_rank_encoder.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/cpu/element.h"
#include "kernels/project.h"

namespace kvswap {
namespace {

/// As they are kept; int4 rows, whose projections are rounded, are the host's alone.
void put(SummaryMemory& memory, DType dtype, std::byte* target, const float* numbers,
         int64_t count) {
  if (dtype == DType::kFloat32) {
    memory.upload(target, numbers, count * int64_t{sizeof(float)});
  } else {
    std::transform(numbers, numbers + count, reinterpret_cast<BFloat16*>(target),
                   from_float<BFloat16>);
  }
}

void widen(const std::byte* numbers, int64_t count, float* target) {
  const auto* source = reinterpret_cast<const BFloat16*>(numbers);
  for (int64_t i = 0; i < count; ++i) target[i] = to_float(source[i]);
}

}  // namespace

Status LowRankEncoder::set_projection(int64_t layer, int64_t rank, const float* keys,
                                      const float* queries) {
  const int64_t width = options_.heads_apart * options_.kv_heads * options_.head_dim;
  const int64_t bytes = width * rank * dtype_bytes(dtype());
  Layer& target = layers_.at(layer);
  target = {};
  auto memory = memory_->allocate(2 * bytes);
  if (memory == nullptr) {
    return Status::budget("set_projection: " + std::to_string(2 * bytes) +
                          " bytes of memory must be available, and are not; lower summary.rank");
  }
  put(*memory_, dtype(), memory.get(), keys, width * rank);
  put(*memory_, dtype(), memory.get() + bytes, queries, width * rank);
  target.rank = rank;
  target.projections = std::move(memory);
  return Status::ok();
}

int64_t LowRankEncoder::projection_bytes() const {
  int64_t numbers = 0;
  for (const Layer& layer : layers_) {
    numbers += 2 * options_.heads_apart * options_.kv_heads * options_.head_dim * layer.rank;
  }
  return numbers * dtype_bytes(dtype());
}

const float* LowRankEncoder::as_floats(int64_t layer, int64_t first, int64_t count) const {
  const std::byte* numbers = layers_[layer].projections.get() + first * dtype_bytes(dtype());
  if (dtype() == DType::kFloat32) return reinterpret_cast<const float*>(numbers);
  thread_local std::vector<float> widened;
  widened.resize(count);
  widen(numbers, count, widened.data());
  return widened.data();
}

void LowRankEncoder::list(int64_t layer, std::vector<SavedTensor>& tensors) const {
  if (!is_ready(layer)) return;
  const int64_t width = options_.heads_apart * options_.kv_heads * options_.head_dim;
  const int64_t rank = layers_[layer].rank;
  const int64_t row_bytes = rank * int64_t{sizeof(float)};
  const int64_t retained_bytes = rank * dtype_bytes(dtype());
  for (const bool is_key : {true, false}) {
    const std::byte* from =
        layers_[layer].projections.get() + (is_key ? 0 : width * retained_bytes);
    tensors.push_back({.name = projection_name(layer, is_key),
                       .dtype = "F32",
                       .shape = {width, rank},
                       .row_bytes = row_bytes,
                       .read = [this, from, rank, retained_bytes](int64_t first, int64_t count,
                                                                  std::byte* target) {
                         const std::byte* rows = from + first * retained_bytes;
                         if (dtype() == DType::kFloat32) {
                           return memory_->download(target, rows, count * retained_bytes);
                         }
                         std::vector<float> widened(count * rank);
                         widen(rows, count * rank, widened.data());
                         std::memcpy(target, widened.data(), widened.size() * sizeof(float));
                         return Status::ok();
                       }});
  }
}

std::string projection_name(int64_t layer, bool is_key) {
  return "layers." + std::to_string(layer) + ".projection." + (is_key ? "key" : "query");
}

void LowRankEncoder::write(int64_t layer, const SummarySlice& piece) const {
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

void LowRankEncoder::ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const {
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
void LowRankEncoder::ask_each_head(int64_t layer, const QueryView& query, int64_t batch,
                                   float scale, float* asked) const {
  const int64_t rank = layers_[layer].rank;
  const int64_t heads = query.heads;
  run_parallel({.parallel = options_.parallel}, batch * query.queries * heads, 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = i / heads;
                   const int64_t head = i % heads;
                   const int64_t kv_head = head / (heads / options_.kv_heads);
                   const int64_t sequence = options_.head_dim * rank;  // a KV head's
                   const int64_t apart = row / query.queries % options_.heads_apart;
                   const int64_t first = (options_.heads_apart + apart) * part_size(layer);
                   const float* projection = as_floats(layer, first + kv_head * sequence, sequence);
                   float* target = asked + i * rank;
                   project_query({.query = query.at(row / query.queries, head, row % query.queries),
                                  .projection = projection,
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
