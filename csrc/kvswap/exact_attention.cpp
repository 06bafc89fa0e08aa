#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/past_walk.h"
#include "io/stopwatch.h"
#include "kernels/cpu/element.h"
#include "kernels/merge_attention.h"
#include "kernels/paged_attention.h"
#include "kernels/records.h"
#include "kvswap/engine_calls.h"

namespace kvswap {
namespace {

template <typename Body>
void with_element(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) {
    body(float{});
  } else if (dtype == DType::kBFloat16) {
    body(BFloat16{});
  } else {
    body(Float16{});
  }
}

/// A part's long chunk (a sequence's, or that of a KV head that is apart): what it has attended so
/// far, and a table of pages to attend next.
class Chunk final : public PastVisitor {
 public:
  /// args: with the query of parts.
  Chunk(const Engine& engine, int64_t part, const AttendArgs& args, int64_t past,
        const ParallelFor& parallel)
      : options_(engine.parts().options),
        validity_(engine.validity(part)),
        args_(args),
        query_(args.query),
        first_(static_cast<const std::byte*>(args.query.at(part, 0, 0))),
        past_(past),
        execution_{.parallel = parallel ? &parallel : nullptr},
        rows_(query_.queries * query_.heads),
        output_(rows_ * options_.head_dim),
        log_sum_exp_(rows_, -std::numeric_limits<float>::infinity()) {}

  Status visit_sealed(const PastStream::Block& block) override {
    const int64_t group_tokens = options_.group_tokens;
    const int64_t end = (block.first_group + block.groups) * group_tokens;
    for (int64_t i = 0; i < block.groups; ++i) {
      add_page(block.listed->pages[i], (block.first_group + i) * group_tokens, end);
    }
    exponents_ = block.listed->exponents;
    attend();
    return Status::ok();
  }

  Status visit_left(const LeftTokens& left) override {
    const int64_t group_tokens = options_.group_tokens;
    for (int64_t token = 0; token < left.count; token += group_tokens) {
      const int64_t count = std::min(group_tokens, left.count - token);
      pages_.push_back(left.pages.data() + token / group_tokens * options_.group_bytes());
      masks_.push_back(~uint64_t{0} >> (64 - count));
      columns_.push_back(0);  // before every query of the chunk
    }
    if (left.count > 0) attend();
    return Status::ok();
  }

  /// Packed as records are.
  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override {
    const RecordShape shape = options_.record_shape();
    const int64_t count = end - begin;
    const int64_t groups = (count + shape.group_tokens - 1) / shape.group_tokens;
    std::vector<std::byte> packed(groups * shape.payload_bytes());
    std::vector<void*> records(groups);
    std::vector<int64_t> first_tokens(groups);
    std::vector<int32_t> lengths(groups);
    for (int64_t i = 0; i < groups; ++i) {
      records[i] = packed.data() + i * shape.payload_bytes();
      first_tokens[i] = i * shape.group_tokens;
      lengths[i] = static_cast<int32_t>(std::min(shape.group_tokens, count - first_tokens[i]));
      add_page(records[i], begin + first_tokens[i], end);
    }
    const int64_t head_stride = count * shape.head_dim;
    pack_records({.shape = shape,
                  .tokens = {.keys = const_cast<std::byte*>(keys),
                             .values = const_cast<std::byte*>(values),
                             .key_head_stride = head_stride,
                             .key_token_stride = shape.head_dim,
                             .value_head_stride = head_stride,
                             .value_token_stride = shape.head_dim},
                  .records = records.data(),
                  .first_tokens = first_tokens.data(),
                  .lengths = lengths.data(),
                  .count = groups});
    attend();
    return Status::ok();
  }

  /// When everything else has been attended. sinks: [heads] of the part.
  void add_sinks(const float* sinks) {
    for (int64_t row = 0; row < rows_; ++row) {
      const float share = 1 / (1 + std::exp(sinks[row % query_.heads] - log_sum_exp_[row]));
      float* output = output_.data() + row * options_.head_dim;
      for (int64_t i = 0; i < options_.head_dim; ++i) output[i] *= share;
      log_sum_exp_[row] -= std::log(share);
    }
  }

  /// The newest `most` queries, with what they attended; everything has been attended.
  KeptTokens::Window window(int64_t most) const {
    const int64_t count = std::min(most, query_.queries);
    const int64_t first = query_.queries - count;
    const int64_t row = options_.head_dim * dtype_bytes(options_.dtype);
    KeptTokens::Window window = {.queries = std::vector<std::byte>(query_.heads * count * row),
                                 .log_sum_exp = std::vector<float>(query_.heads * count),
                                 .count = count,
                                 .first_column = past_ + first,
                                 .scale = args_.scale,
                                 .softcap = args_.softcap};
    for (int64_t head = 0; head < query_.heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t element = head * query_.head_stride + (first + i) * query_.query_stride;
        std::copy_n(first_ + element * dtype_bytes(options_.dtype), row,
                    window.queries.begin() + (head * count + i) * row);
        window.log_sum_exp[head * count + i] = log_sum_exp_[(first + i) * query_.heads + head];
      }
    }
    return window;
  }

  /// [tokens, heads, head_dim] of the session's dtype, tokens `stride` elements apart.
  void write(std::byte* target, int64_t stride) const {
    const int64_t width = query_.heads * options_.head_dim;
    with_element(options_.dtype, [&](auto element) {
      using T = decltype(element);
      for (int64_t i = 0; i < rows_ * options_.head_dim; ++i) {
        reinterpret_cast<T*>(target)[i / width * stride + i % width] = from_float<T>(output_[i]);
      }
    });
  }

 private:
  /// Adds a page whose first token stands at `column`, of which columns below `end` are there.
  void add_page(const void* record, int64_t column, int64_t end) {
    const int64_t count = std::min(options_.group_tokens, end - column);
    pages_.push_back(record);
    masks_.push_back(validity_.mask(column, count));
    columns_.push_back(static_cast<int32_t>(column));
  }

  /// Attends over the pages added since the last call, a few rows of the chunk at a time.
  void attend() {
    for (int64_t row = 0; row < query_.queries; row += kChunkQueriesMax) {
      attend_rows(row, std::min(kChunkQueriesMax, query_.queries - row));
    }
    pages_.clear();
    masks_.clear();
    columns_.clear();
    exponents_.clear();
  }

  void attend_rows(int64_t row, int64_t count) {
    const int64_t heads = query_.heads;
    const int64_t dim = options_.head_dim;
    const int64_t element = dtype_bytes(options_.dtype);
    part_.resize(count * heads * dim * element);
    by_head_.resize(count * heads);
    by_row_.resize(count * heads);
    const auto pages = static_cast<int32_t>(pages_.size());
    const auto column = static_cast<int32_t>(past_ + row);
    paged_attention({.query = first_ + row * query_.query_stride * element,
                     .query_batch_stride = query_.batch_stride,
                     .query_head_stride = query_.head_stride,
                     .query_token_stride = query_.query_stride,
                     .output = part_.data(),
                     .log_sum_exp = by_head_.data(),
                     .pages = pages_.data(),
                     .masks = masks_.data(),
                     .columns = columns_.data(),
                     .page_counts = &pages,
                     .query_columns = &column,
                     .exponents = exponents_.empty() ? nullptr : exponents_.data(),
                     .pages_max = pages,
                     .table_heads = 1,
                     .batch = 1,
                     .heads = heads,
                     .queries = count,
                     .scale = args_.scale,
                     .softcap = args_.softcap,
                     .shape = options_.record_shape(),
                     .dtype = options_.dtype},
                    execution_);
    // The kernel's log-sum-exps are [heads, rows], its output [rows, heads, ...].
    for (int64_t i = 0; i < count * heads; ++i) {
      by_row_[i] = by_head_[i % heads * count + i / heads];
    }
    merge_attention({.output = output_.data() + row * heads * dim,
                     .log_sum_exp = log_sum_exp_.data() + row * heads,
                     .other_output = part_.data(),
                     .other_log_sum_exp = by_row_.data(),
                     .rows = count * heads,
                     .head_dim = dim,
                     .dtype = DType::kFloat32,
                     .other_dtype = options_.dtype},
                    execution_);
  }

  const EngineOptions& options_;
  const TokenValidity& validity_;
  const AttendArgs& args_;
  QueryView query_;
  const std::byte* first_;
  int64_t past_;
  Execution execution_;
  int64_t rows_;
  std::vector<float> output_;       // [tokens, heads, head_dim]
  std::vector<float> log_sum_exp_;  // [tokens, heads]
  std::vector<const void*> pages_;
  std::vector<uint64_t> masks_;
  std::vector<int32_t> columns_;
  std::vector<int8_t> exponents_;  // of the pages; empty: all of the session's dtype
  std::vector<std::byte> part_;    // one piece of rows, of the session's dtype
  std::vector<float> by_head_;
  std::vector<float> by_row_;
};

}  // namespace

Status attend_exactly(Engine& engine, const AttendArgs& args, const ParallelFor& parallel) {
  const Stopwatch watch(engine.parts().timeline.get(),
                        {.kind = SpanKind::kAttendExactly, .layer = args.layer});
  engine.count_restored(args.layer, args.query.queries);
  const EngineOptions& options = engine.options();
  const int64_t columns = engine.columns(args.layer);
  const int64_t past = columns - args.query.queries;
  const int64_t row = args.query.heads * options.head_dim;
  const int64_t apart = engine.heads_apart();
  AttendArgs of_part = args;
  of_part.query = engine.parts_of(args.query);
  for (int64_t part = 0; part < engine.batch() * apart; ++part) {
    Chunk chunk(engine, part, of_part, past, parallel);
    KVSWAP_RETURN_IF_ERROR(walk_past(engine, {args.layer, part, past, columns}, chunk));
    if (args.sinks != nullptr) chunk.add_sinks(args.sinks + part % apart * of_part.query.heads);
    const int64_t observed = engine.observed_queries(args.layer);
    if (observed > 0) engine.observe(args.layer, part, chunk.window(observed));
    const int64_t first = part / apart * args.query.queries * row + part % apart * row / apart;
    chunk.write(static_cast<std::byte*>(args.output) + first * dtype_bytes(options.dtype), row);
  }
  engine.end_chunk(args.layer, args.query.queries);
  return Status::ok();
}

}  // namespace kvswap
