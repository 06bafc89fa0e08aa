#include <algorithm>
#include <vector>

#include "kernels/merge_attention.h"
#include "kernels/paged_attention.h"
#include "kernels/records.h"
#include "kvswap/host_part.h"

namespace kvswap {
namespace {

/// Attends over a table of pages, filled anew for each call of the kernel.
class PagedPart final : public HostPart {
 public:
  PagedPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args)
      : HostPart(engine, part, view, args) {
    attend_tokens(view.position, view.position + view.query.queries, view.own);
  }

  Status visit_sealed(const PastStream::Block& block) override {
    const int64_t group_tokens = options().group_tokens;
    const int64_t end = (block.first_group + block.groups) * group_tokens;
    for (int64_t i = 0; i < block.groups; ++i) {
      add_page(block.listed->pages[i], (block.first_group + i) * group_tokens, end);
    }
    exponents_ = block.listed->exponents;
    attend();
    return Status::ok();
  }

  Status visit_left(const LeftTokens& left) override {
    const int64_t group_tokens = options().group_tokens;
    for (int64_t token = 0; token < left.count; token += group_tokens) {
      const int64_t count = std::min(group_tokens, left.count - token);
      pages_.push_back(left.pages.data() + token / group_tokens * options().group_bytes());
      masks_.push_back(~uint64_t{0} >> (64 - count));
      positions_.push_back(0);  // before every query of the chunk
    }
    if (left.count > 0) attend();
    return Status::ok();
  }

 private:
  /// Packed as records are.
  void attend_tokens(int64_t begin, int64_t end, const KeyValueView& tokens) override {
    const RecordShape shape = options().record_shape();
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
    const int64_t count = std::min(options().group_tokens, end - position);
    pages_.push_back(record);
    masks_.push_back(validity().mask(position, count));
    positions_.push_back(static_cast<int32_t>(position));
  }

  /// Attends over the pages added since the last call, a few rows of the chunk at a time.
  void attend() {
    for (int64_t row = 0; row < query().queries; row += kChunkQueriesMax) {
      attend_rows(row, std::min(kChunkQueriesMax, query().queries - row));
    }
    pages_.clear();
    masks_.clear();
    positions_.clear();
    exponents_.clear();
  }

  void attend_rows(int64_t row, int64_t count) {
    const int64_t heads = query().heads;
    const int64_t dim = options().head_dim;
    const int64_t element = dtype_bytes(options().dtype);
    part_.resize(count * heads * dim * element);
    by_head_.resize(count * heads);
    by_row_.resize(count * heads);
    const auto pages = static_cast<int32_t>(pages_.size());
    const auto position = static_cast<int32_t>(view().position + row);
    paged_attention({.query = query().at(0, 0, row),
                     .query_batch_stride = query().batch_stride,
                     .query_head_stride = query().head_stride,
                     .query_token_stride = query().query_stride,
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
                     .scale = scale(),
                     .softcap = softcap(),
                     .shape = options().record_shape(),
                     .dtype = options().dtype},
                    execution());
    // The kernel's log-sum-exps are [heads, rows], its output [rows, heads, ...].
    for (int64_t i = 0; i < count * heads; ++i) {
      by_row_[i] = by_head_[i % heads * count + i / heads];
    }
    merge_attention({.output = output() + row * heads * dim,
                     .log_sum_exp = log_sum_exp() + row * heads,
                     .other_output = part_.data(),
                     .other_log_sum_exp = by_row_.data(),
                     .rows = count * heads,
                     .head_dim = dim,
                     .dtype = DType::kFloat32,
                     .other_dtype = options().dtype},
                    execution());
  }

  std::vector<const void*> pages_;
  std::vector<uint64_t> masks_;
  std::vector<int32_t> positions_;
  std::vector<int8_t> exponents_;  // of the pages; empty: all of the session's dtype
  std::vector<std::byte> part_;    // one piece of rows, of the session's dtype
  std::vector<float> by_head_;
  std::vector<float> by_row_;
};

}  // namespace

std::unique_ptr<ExactPart> paged_part(const Engine& engine, int64_t part, const PartView& view,
                                      const AttendArgs& args) {
  return std::make_unique<PagedPart>(engine, part, view, args);
}

}  // namespace kvswap
