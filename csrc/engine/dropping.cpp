// Where nothing is on disk: what is dropped for good, and what is left of it.

#include <algorithm>
#include <limits>

#include "engine/keeping.h"

namespace kvswap {

void Keeping::let_go(int64_t layer) {
  const EngineOptions& options = parts_.options;
  if (!options.drops()) return;
  const int64_t held_bytes = parts_.store->bytes_held();
  const int64_t columns = batch_.layer(layer).columns;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const KeptTokens& kept = batch_.pages(part).kept(layer);
    int64_t end = std::min(batch_.layer(layer).sealed_groups,
                           options.sealed_groups(columns - options.columns_to_crop()));
    if (options.keeps_tokens(layer)) {
      if (kept.is_due) continue;
      if (options.keep_interval > 0 || joins()) {
        end = std::min(end, kept.joined_columns / options.group_tokens);
      }
    }
    const bool is_new = end > parts_.store->first_group(layer, part);
    if (is_new && !batch_.fits(layer, part, end)) parts_.store->drop(layer, part, end);
  }
  parts_.ledger.release(Use::kStaging, held_bytes - parts_.store->bytes_held());
}

Status Keeping::turn_before_chunk(int64_t layer) {
  const int64_t columns = batch_.layer(layer).columns;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const KeptTokens::Window& window = batch_.pages(part).kept(layer).window;
    if (window.count > 0 && window.first_column + window.count > columns) return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(turn(layer, columns));
  let_go(layer);
  return Status::ok();
}

const Keeping::Left& Keeping::left(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  SequencePages& pages = batch_.pages(part);
  const KeptTokens& kept = pages.kept(layer);
  const int64_t group_tokens = options.group_tokens;
  const int64_t gone = parts_.store->first_group(layer, part) * group_tokens;
  left_.count = 0;
  left_.columns.clear();
  left_.pages.clear();
  const std::vector<int32_t>& sinks = pages.sinks(layer);
  for (size_t sink = 0; sink < sinks.size(); ++sink) {
    if (sinks[sink] * group_tokens >= gone) continue;
    for (uint64_t left = batch_.mask(layer, part, sinks[sink]); left != 0; left &= left - 1) {
      const int64_t slot = __builtin_ctzll(left);
      add_left(pages.sink_page(layer, static_cast<int64_t>(sink)), slot,
               sinks[sink] * group_tokens + slot);
    }
  }
  const std::vector<int32_t>& in_dtype = kept.columns();
  for (int64_t i = 0; i < std::ssize(in_dtype) && in_dtype[i] < gone; ++i) {
    add_left(pages.kept_page(layer, i / group_tokens), i % group_tokens, in_dtype[i]);
  }
  const std::vector<int32_t>& float8 = kept.float8();
  decoded_.resize(options.group_bytes());
  for (int64_t i = 0; i < std::ssize(float8) && float8[i] < gone; ++i) {
    const int64_t page = i / group_tokens;
    if (i % group_tokens == 0) {
      decode_page(options, pages.kept_float8_page(layer, page),
                  kept.exponents().data() + page * options.page_note_bytes(), decoded_.data());
    }
    add_left(decoded_.data(), i % group_tokens, float8[i]);
  }
  return left_;
}

void Keeping::add_left(const std::byte* page, int64_t slot, int64_t column) {
  const EngineOptions& options = parts_.options;
  const int64_t place = left_.count++;
  const int64_t to = place / options.group_tokens;
  if (place % options.group_tokens == 0) {
    left_.columns.resize((to + 1) * options.group_tokens);
    left_.pages.resize((to + 1) * options.group_bytes());
  }
  left_.columns[place] = static_cast<int32_t>(column);
  copy_token(left_.pages.data() + to * options.group_bytes(), place % options.group_tokens, page,
             slot);
}

/// As weigh_past(), those whose records are gone.
void Keeping::weigh_left(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  if (parts_.store->first_group(layer, part) == 0) return;
  const int64_t group_tokens = options.group_tokens;
  const Left& all = left(layer, part);
  const int64_t pages = (all.count + group_tokens - 1) / group_tokens;
  const int64_t most = 2 * options.past_block_groups(parts_.record_bytes());
  for (int64_t first = 0; first < pages; first += most) {
    const int64_t count = std::min(most, pages - first);
    masks_.clear();
    pages_.clear();
    for (int64_t page = first; page < first + count; ++page) {
      const int64_t tokens = std::min(group_tokens, all.count - page * group_tokens);
      pages_.push_back(all.pages.data() + page * options.group_bytes());
      masks_.push_back(~uint64_t{0} >> (64 - tokens));
    }
    columns_.assign(count, 0);  // before every query of the window
    page_count_ = static_cast<int32_t>(count);
    listed_.exponents.assign(count * options.note_bytes(), kNotFloat8);
    weigh_block({layer, part, 0, count}, all.columns.data() + first * group_tokens);
  }
}

/// Those that are gone are nobody's choice.
void Keeping::forget_gone(int64_t layer, int64_t part, std::span<float> mass) const {
  const int64_t gone = parts_.store->first_group(layer, part) * parts_.options.group_tokens;
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  for (int64_t column = 0; column < std::min<int64_t>(gone, std::ssize(mass)); ++column) {
    if (kept.mask(column, 1) == 0) mass[column] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace kvswap
