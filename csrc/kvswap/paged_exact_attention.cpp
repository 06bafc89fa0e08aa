#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/element.h"
#include "kernels/merge_attention.h"
#include "kernels/paged_attention.h"
#include "kernels/records.h"
#include "kvswap/exact_attention.h"

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

/// What a part attends of a chunk, in memory of the host.
struct PartView {
  QueryView query;               // of the part alone: sequence 0
  KeyValueView own;              // likewise
  int64_t position = 0;          // of the first token
  const float* sinks = nullptr;  // [heads]
  std::byte* output = nullptr;   // [tokens, ...] of the cache's dtype
  int64_t output_stride = 0;     // elements from token to token
};

/// What a part has attended so far, and a table of pages to attend next.
class PagedPart final : public ExactPart {
 public:
  PagedPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args)
      : options_(engine.parts().options),
        validity_(engine.sequences().validity(part)),
        view_(view),
        query_(view.query),
        scale_(args.scale),
        softcap_(args.softcap),
        execution_{.parallel = engine.parts().threads()},
        rows_(query_.queries * query_.heads),
        output_(rows_ * options_.head_dim),
        log_sum_exp_(rows_, -std::numeric_limits<float>::infinity()) {
    attend_tokens(view.position, view.position + query_.queries, view.own);
  }

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
      positions_.push_back(0);  // before every query of the chunk
    }
    if (left.count > 0) attend();
    return Status::ok();
  }

  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override {
    const int64_t head_stride = (end - begin) * options_.head_dim;
    attend_tokens(begin, end,
                  {.keys = keys,
                   .values = values,
                   .key_head_stride = head_stride,
                   .key_token_stride = options_.head_dim,
                   .value_head_stride = head_stride,
                   .value_token_stride = options_.head_dim});
    return Status::ok();
  }

  void add_sinks() override {
    for (int64_t row = 0; row < rows_; ++row) {
      const float share = 1 / (1 + std::exp(view_.sinks[row % query_.heads] - log_sum_exp_[row]));
      float* output = output_.data() + row * options_.head_dim;
      for (int64_t i = 0; i < options_.head_dim; ++i) output[i] *= share;
      log_sum_exp_[row] -= std::log(share);
    }
  }

  KeptTokens::Window window(int64_t most) const override {
    const int64_t count = std::min(most, query_.queries);
    const int64_t first = query_.queries - count;
    const int64_t row = options_.head_dim * dtype_bytes(options_.dtype);
    KeptTokens::Window window = {.queries = std::vector<std::byte>(query_.heads * count * row),
                                 .log_sum_exp = std::vector<float>(query_.heads * count),
                                 .count = count,
                                 .first_position = view_.position + first,
                                 .scale = scale_,
                                 .softcap = softcap_};
    for (int64_t head = 0; head < query_.heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(static_cast<const std::byte*>(query_.at(0, head, first + i)), row,
                    window.queries.begin() + (head * count + i) * row);
        window.log_sum_exp[head * count + i] = log_sum_exp_[(first + i) * query_.heads + head];
      }
    }
    return window;
  }

  void write() override {
    const int64_t width = query_.heads * options_.head_dim;
    with_element(options_.dtype, [&](auto element) {
      using T = decltype(element);
      for (int64_t i = 0; i < rows_ * options_.head_dim; ++i) {
        reinterpret_cast<T*>(view_.output)[i / width * view_.output_stride + i % width] =
            from_float<T>(output_[i]);
      }
    });
  }

 private:
  /// Tokens of one part at positions [begin, end), packed as records are.
  void attend_tokens(int64_t begin, int64_t end, const KeyValueView& tokens) {
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
    pack_records({.shape = shape,
                  .tokens = {.keys = const_cast<void*>(tokens.keys),
                             .values = const_cast<void*>(tokens.values),
                             .key_head_stride = tokens.key_head_stride,
                             .key_token_stride = tokens.key_token_stride,
                             .value_head_stride = tokens.value_head_stride,
                             .value_token_stride = tokens.value_token_stride},
                  .records = records.data(),
                  .first_tokens = first_tokens.data(),
                  .lengths = lengths.data(),
                  .count = groups});
    attend();
  }

  /// Adds a page whose first token stands at `position`, of which positions below `end` are there.
  void add_page(const void* record, int64_t position, int64_t end) {
    const int64_t count = std::min(options_.group_tokens, end - position);
    pages_.push_back(record);
    masks_.push_back(validity_.mask(position, count));
    positions_.push_back(static_cast<int32_t>(position));
  }

  /// Attends over the pages added since the last call, a few rows of the chunk at a time.
  void attend() {
    for (int64_t row = 0; row < query_.queries; row += kChunkQueriesMax) {
      attend_rows(row, std::min(kChunkQueriesMax, query_.queries - row));
    }
    pages_.clear();
    masks_.clear();
    positions_.clear();
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
    const auto position = static_cast<int32_t>(view_.position + row);
    paged_attention({.query = query_.at(0, 0, row),
                     .query_batch_stride = query_.batch_stride,
                     .query_head_stride = query_.head_stride,
                     .query_token_stride = query_.query_stride,
                     .output = part_.data(),
                     .log_sum_exp = by_head_.data(),
                     .pages = pages_.data(),
                     .masks = masks_.data(),
                     .positions = positions_.data(),
                     .page_counts = &pages,
                     .query_positions = &position,
                     .exponents = exponents_.empty() ? nullptr : exponents_.data(),
                     .pages_max = pages,
                     .table_heads = 1,
                     .batch = 1,
                     .heads = heads,
                     .queries = count,
                     .scale = scale_,
                     .softcap = softcap_,
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
  const PartView view_;
  const QueryView query_;
  const float scale_;
  const float softcap_;
  const Execution execution_;
  int64_t rows_;
  std::vector<float> output_;       // [tokens, heads, head_dim]
  std::vector<float> log_sum_exp_;  // [tokens, heads]
  std::vector<const void*> pages_;
  std::vector<uint64_t> masks_;
  std::vector<int32_t> positions_;
  std::vector<int8_t> exponents_;  // of the pages; empty: all of the session's dtype
  std::vector<std::byte> part_;    // one piece of rows, of the session's dtype
  std::vector<float> by_head_;
  std::vector<float> by_row_;
};

/// Elements that a strided array [batch, heads, tokens, head_dim] reaches over.
struct Reach {
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t head_dim;

  int64_t elements(int64_t batch_stride, int64_t head_stride, int64_t token_stride) const {
    return (batch - 1) * batch_stride + (heads - 1) * head_stride + (tokens - 1) * token_stride +
           head_dim;
  }
};

/// A chunk's arrays, in memory of the host.
class PagedChunk final : public ExactChunk {
 public:
  PagedChunk(Engine& engine, const ExactArgs& args)
      : engine_(engine), args_(args), query_(args.attention.query), own_(args.own) {}

  /// On a device, copies them there; their strides stay.
  Status fetch() {
    const EngineOptions& options = engine_.options();
    output_ = static_cast<std::byte*>(args_.attention.output);
    output_bytes_ = engine_.batch() * query_.queries * query_.heads * options.head_dim *
                    dtype_bytes(options.dtype);
    sinks_ = args_.attention.sinks;
    if (!options.device) return Status::ok();
    if (sinks_ != nullptr) {
      sinks_copy_.resize(query_.heads);
      KVSWAP_RETURN_IF_ERROR(engine_.parts().space->compute().download(
          reinterpret_cast<std::byte*>(sinks_copy_.data()),
          reinterpret_cast<const std::byte*>(sinks_), query_.heads * int64_t{sizeof(float)}));
      sinks_ = sinks_copy_.data();
    }
    output_copy_.resize(output_bytes_);
    output_ = output_copy_.data();
    const Reach asked = {engine_.batch(), query_.heads, query_.queries, options.head_dim};
    KVSWAP_RETURN_IF_ERROR(
        download(asked.elements(query_.batch_stride, query_.head_stride, query_.query_stride),
                 query_.data, query_copy_));
    query_.data = query_copy_.data();
    if (args_.is_own_host) return Status::ok();
    const Reach own = {engine_.batch(), options.kv_heads, query_.queries, options.head_dim};
    KVSWAP_RETURN_IF_ERROR(
        download(own.elements(own_.key_batch_stride, own_.key_head_stride, own_.key_token_stride),
                 own_.keys, keys_copy_));
    own_.keys = keys_copy_.data();
    KVSWAP_RETURN_IF_ERROR(download(
        own.elements(own_.value_batch_stride, own_.value_head_stride, own_.value_token_stride),
        own_.values, values_copy_));
    own_.values = values_copy_.data();
    return Status::ok();
  }

  bool attend_alone() override { return false; }
  void clear() override { std::fill_n(output_, output_bytes_, std::byte{0}); }

  std::unique_ptr<ExactPart> part(int64_t part, int64_t begin) override {
    const EngineOptions& options = engine_.options();
    const int64_t apart = engine_.parts().options.heads_apart;
    const int64_t element = dtype_bytes(options.dtype);
    const int64_t row = query_.heads * options.head_dim;
    QueryView query = query_.of_parts(apart);
    query.data = query.at(part, 0, begin);
    query.queries -= begin;
    query.heads_apart = 1;
    const int64_t sequence = part / apart;
    const int64_t head = part % apart;
    KeyValueView own = own_;
    own.keys = static_cast<const std::byte*>(own_.keys) +
               element * (sequence * own_.key_batch_stride + head * own_.key_head_stride +
                          begin * own_.key_token_stride);
    own.values = static_cast<const std::byte*>(own_.values) +
                 element * (sequence * own_.value_batch_stride + head * own_.value_head_stride +
                            begin * own_.value_token_stride);
    const int64_t first = (sequence * query_.queries + begin) * row + head * row / apart;
    const PartView view = {.query = query,
                           .own = own,
                           .position = args_.past + begin,
                           .sinks = sinks_ == nullptr ? nullptr : sinks_ + head * query.heads,
                           .output = output_ + first * element,
                           .output_stride = row};
    return std::make_unique<PagedPart>(engine_, part, view, args_.attention);
  }

  Status finish() override {
    if (output_copy_.empty()) return Status::ok();
    return engine_.parts().space->compute().upload(static_cast<std::byte*>(args_.attention.output),
                                                   output_copy_.data(), output_bytes_);
  }

 private:
  Status download(int64_t elements, const void* from, std::vector<std::byte>& to) {
    to.resize(elements * dtype_bytes(engine_.options().dtype));
    return engine_.parts().space->compute().download(to.data(), static_cast<const std::byte*>(from),
                                                     static_cast<int64_t>(to.size()));
  }

  Engine& engine_;
  const ExactArgs args_;
  QueryView query_;
  KeyValueView own_;
  std::byte* output_ = nullptr;  // [batch, tokens, heads, head_dim]
  int64_t output_bytes_ = 0;
  const float* sinks_ = nullptr;
  std::vector<float> sinks_copy_;
  std::vector<std::byte> query_copy_;
  std::vector<std::byte> keys_copy_;
  std::vector<std::byte> values_copy_;
  std::vector<std::byte> output_copy_;
};

class PagedExactAttention final : public ExactAttention {
 public:
  Result<std::unique_ptr<ExactChunk>> begin(Engine& engine, const ExactArgs& args) const override {
    auto chunk = std::make_unique<PagedChunk>(engine, args);
    KVSWAP_RETURN_IF_ERROR(chunk->fetch());
    return std::unique_ptr<ExactChunk>(std::move(chunk));
  }
};

}  // namespace

std::shared_ptr<ExactAttention> paged_exact_attention() {
  return std::make_shared<PagedExactAttention>();
}

}  // namespace kvswap
