#include "engine/retention/observation_block.h"

#include <algorithm>

#include "kernels/record_codec.h"

namespace kvswap {

void ObservationBlock::take(const PrefixReader::Groups& groups, const Batch& batch) {
  masks_.clear();
  positions_.clear();
  for (int64_t i = 0; i < groups.count; ++i) {
    masks_.push_back(batch.mask(groups.layer, groups.sequence, groups.first + i));
    positions_.push_back(static_cast<int32_t>((groups.first + i) * plan_.options.group_tokens));
  }
  pages_.assign(listed_.pages.begin(), listed_.pages.end());
  page_count_ = static_cast<int32_t>(groups.count);
}

void ObservationBlock::take(const SurvivingTokens& left, int64_t first_page, int64_t pages) {
  const int64_t group_tokens = plan_.options.group_tokens;
  masks_.clear();
  pages_.clear();
  for (int64_t page = first_page; page < first_page + pages; ++page) {
    const int64_t tokens = std::min(group_tokens, left.count - page * group_tokens);
    pages_.push_back(left.pages.data() + page * plan_.group_bytes);
    masks_.push_back(~uint64_t{0} >> (64 - tokens));
  }
  positions_.assign(pages, 0);  // before every query of the window
  page_count_ = static_cast<int32_t>(pages);
  listed_.exponents.assign(pages * plan_.note_bytes, kNotFloat8);
}

PagedAttentionArgs ObservationBlock::asked(const ObservationWindow& window, int64_t first,
                                           float* log_sums) {
  const int64_t query_bytes = plan_.options.head_dim * dtype_bytes(plan_.options.dtype);
  const int64_t slots = window.slots == 0 ? window.count : window.slots;
  query_position_ = static_cast<int32_t>(window.first_position + first);
  return {.query = window.queries.data() + window.slot(first) * query_bytes,
          .query_head_stride = slots * plan_.options.head_dim,
          .query_token_stride = plan_.options.head_dim,
          .log_sum_exp = log_sums,
          .pages = pages_.data(),
          .masks = masks_.data(),
          .positions = positions_.data(),
          .page_counts = &page_count_,
          .query_positions = &query_position_,
          .exponents = listed_.exponents.empty() ? nullptr : listed_.exponents.data(),
          .pages_max = page_count_,
          .batch = 1,
          .heads = plan_.options.query_heads,
          .queries = std::min(kChunkQueriesMax, window.in_a_row(first)),
          .scale = window.scale,
          .softcap = window.softcap,
          .shape = plan_.record_shape,
          .dtype = plan_.options.dtype};
}

}  // namespace kvswap
