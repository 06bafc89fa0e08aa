#include "methods/retention/retained_tokens.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "methods/selection/padding_mask.h"

namespace kvswap {

void grow_mass(std::vector<float>& mass, int64_t tokens) {
  if (static_cast<int64_t>(mass.size()) >= tokens) return;
  mass.reserve((tokens + kMassUnit - 1) / kMassUnit * kMassUnit);
  mass.resize(tokens, 0.0f);
}

void RetainedTokens::note_chunk(int64_t begin) {
  const bool is_pending = is_due && due_begin < 0;
  before = {.due_from = is_pending ? std::optional(due_from) : std::nullopt,
            .next = std::move(next),
            .overlap = overlap,
            .begins_anew = begins_anew};
  begins_anew = true;
  next.reset();
  overlap.reset();
  is_due = true;
  due_from = 0;
  due_begin = begin;
}

void RetainedTokens::undo_chunk() {
  window = {};
  is_due = before.due_from.has_value();
  due_from = before.due_from.value_or(0);
  due_begin = -1;
  next = std::move(before.next);
  overlap = before.overlap;
  begins_anew = before.begins_anew;
  before = {};
}

void RetainedTokens::count_queries(int64_t fresh, int64_t interval) {
  queries_since += fresh;
  if (is_due || interval == 0 || queries_since < interval) return;
  is_due = true;
  due_from = seen_positions;
  due_begin = -1;
}

void RetainedTokens::skip_refresh(int64_t interval, bool keeps_window) {
  if (queries_since < interval) return;
  queries_since = 0;
  begins_anew = true;
  if (!keeps_window) window = {};
}

void RetainedTokens::end_refresh(int64_t sealed_positions) {
  next.reset();
  queries_since = 0;
  is_due = false;
  admitted_positions = sealed_positions;
}

void RetainedTokens::set_float8(std::vector<int32_t> positions, std::vector<int8_t> exponents) {
  float8_ = std::move(positions);
  exponents_ = std::move(exponents);
}

void RetainedTokens::set(std::vector<int32_t> positions, int64_t group_tokens) {
  positions_ = std::move(positions);
  std::vector<int32_t> all;
  all.reserve(count());
  std::merge(positions_.begin(), positions_.end(), float8_.begin(), float8_.end(),
             std::back_inserter(all));
  bits_.assign(all.empty() ? 0 : all.back() / 64 + 1, 0);
  for (const int32_t position : all) bits_[position / 64] |= uint64_t{1} << (position % 64);
  whole_groups_.clear();
  for (size_t i = 0; i + group_tokens <= all.size(); ++i) {
    // Rising and distinct: where the first and the last of a group are so far apart, all are there.
    const bool is_first = all[i] % group_tokens == 0;
    if (is_first && all[i + group_tokens - 1] == all[i] + group_tokens - 1) {
      whole_groups_.push_back(static_cast<int32_t>(all[i] / group_tokens));
    }
  }
}

uint64_t RetainedTokens::mask(int64_t first, int64_t count) const {
  return bits_at(bits_, first, count);
}

void RetainedTokens::truncate(const Cut& cut) {
  const auto end = std::lower_bound(positions_.begin(), positions_.end(), cut.sealed);
  const auto float8_end = std::lower_bound(float8_.begin(), float8_.end(), cut.sealed);
  if (end != positions_.end() || float8_end != float8_.end()) {
    float8_.erase(float8_end, float8_.end());
    set(std::vector<int32_t>(positions_.begin(), end), cut.group_tokens);
  }
  if (is_due && cut.positions <= due_begin && count() > 0) undo_chunk();
  if (cut.positions == 0) {
    window = {};
    is_due = false;
  }
  if (next) std::erase_if(*next, [&](int32_t position) { return position >= cut.sealed; });
  excluded.erase(std::lower_bound(excluded.begin(), excluded.end(), cut.sealed), excluded.end());
  std::erase_if(ranked, [&](int32_t position) { return position >= cut.sealed; });
  if (cut.positions == 0) spread.reset();
  admitted_positions = std::min(admitted_positions, cut.sealed);
  candidates = std::min(candidates, cut.sealed);
  due_begin = std::min(due_begin, cut.positions);
  if (before.due_from) before.due_from = std::min(*before.due_from, cut.positions);
  if (window.log_sum_exp.empty()) window.truncate(cut.positions);
  if (seen_positions - cut.positions <= cut.step) return;
  seen_positions = cut.positions;
  due_from = std::min(due_from, cut.positions);
  if (static_cast<int64_t>(mass.size()) > cut.positions) mass.resize(cut.positions);
  if (static_cast<int64_t>(decay.size()) > cut.positions) decay.resize(cut.positions);
}

}  // namespace kvswap
