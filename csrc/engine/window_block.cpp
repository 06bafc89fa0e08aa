#include "engine/window_block.h"

#include <algorithm>

#include "kernels/record_codec.h"

namespace kvswap {

int64_t WindowBlock::bytes(const EngineOptions& apart, int64_t groups) {
  // A page, its mask and its position.
  return groups * (20 + apart.note_bytes());
}

void WindowBlock::take(const PastReader::Groups& groups, const Batch& batch) {
  masks_.clear();
  positions_.clear();
  for (int64_t i = 0; i < groups.count; ++i) {
    masks_.push_back(batch.mask(groups.layer, groups.sequence, groups.first + i));
    positions_.push_back(static_cast<int32_t>((groups.first + i) * options_.group_tokens));
  }
  pages_.assign(listed_.pages.begin(), listed_.pages.end());
  page_count_ = static_cast<int32_t>(groups.count);
}

void WindowBlock::take(const LeftTokens& left, int64_t first_page, int64_t pages) {
  const int64_t group_tokens = options_.group_tokens;
  masks_.clear();
  pages_.clear();
  for (int64_t page = first_page; page < first_page + pages; ++page) {
    const int64_t tokens = std::min(group_tokens, left.count - page * group_tokens);
    pages_.push_back(left.pages.data() + page * options_.group_bytes());
    masks_.push_back(~uint64_t{0} >> (64 - tokens));
  }
  positions_.assign(pages, 0);  // before every query of the window
  page_count_ = static_cast<int32_t>(pages);
  listed_.exponents.assign(pages * options_.note_bytes(), kNotFloat8);
}

PagedAttentionArgs WindowBlock::asked(const QueryWindow& window, int64_t first, float* log_sums) {
  const int64_t query_bytes = options_.head_dim * dtype_bytes(options_.dtype);
  const int64_t slots = window.slots == 0 ? window.count : window.slots;
  query_position_ = static_cast<int32_t>(window.first_position + first);
  return {.query = window.queries.data() + window.slot(first) * query_bytes,
          .query_head_stride = slots * options_.head_dim,
          .query_token_stride = options_.head_dim,
          .log_sum_exp = log_sums,
          .pages = pages_.data(),
          .masks = masks_.data(),
          .positions = positions_.data(),
          .page_counts = &page_count_,
          .query_positions = &query_position_,
          .exponents = listed_.exponents.empty() ? nullptr : listed_.exponents.data(),
          .pages_max = page_count_,
          .batch = 1,
          .heads = options_.query_heads,
          .queries = std::min(kChunkQueriesMax, window.in_a_row(first)),
          .scale = window.scale,
          .softcap = window.softcap,
          .shape = options_.record_shape(),
          .dtype = options_.dtype};
}

}  // namespace kvswap
