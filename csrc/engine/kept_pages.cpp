#include "engine/kept_pages.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/page_tokens.h"

namespace kvswap {
namespace {

/// Where a position stands among some that rise; their number: it does not.
int64_t place_of(const std::vector<int32_t>& positions, int32_t position) {
  const auto found = std::lower_bound(positions.begin(), positions.end(), position);
  if (found == positions.end() || *found != position) return std::ssize(positions);
  return found - positions.begin();
}

}  // namespace

void KeptPages::reserve(Arena& arena, const Plan& plan) {
  const KeepPlan& keep = plan.keep;
  if (keep.pages == 0) return;
  const int64_t loads = 2 * plan.past_block_groups * Fetch::bytes_per_load();
  // A record, and a page that is encoded.
  const int64_t rounded = keep.kind.joins ? 2 * plan.group_bytes : 0;
  const int64_t copies = plan.options.device ? keep.pages * plan.token_page_bytes +
                                                   (keep.kind.joins ? plan.group_bytes : 0)
                                             : 0;
  arena.take(Use::kStaging, loads + rounded + copies + (keep.layer_pages + 1) * plan.group_bytes +
                                keep.in_dtype_max * int64_t{sizeof(size_t)});
}

/// Before they are read: they stand until they are written.
Status KeptPages::look_at_kept(int64_t layer, int64_t part) {
  const int64_t bytes = parts_.keep.pages * parts_.plan.token_page_bytes;
  SequencePages& pages = batch_.pages(part);
  divided_ = &pages;
  layer_ = layer;
  if (parts_.keep.divides_layers) return Status::ok();
  if (pages.kept(layer).count() == 0) return Status::ok();
  auto seen = parts_.space->compute().look_at(pages.kept_page(layer, 0), bytes, kept_copy_);
  if (!seen.is_ok()) return seen.status();
  kept_ = seen.value();
  return Status::ok();
}

const std::byte* KeptPages::kept_page(int64_t page) const {
  if (parts_.keep.divides_layers) return divided_->kept_page(layer_, page);
  return kept_ + page * parts_.plan.token_page_bytes;
}

/// The first of what was gathered becomes kept pages.
Status KeptPages::write(int64_t layer, int64_t part, int64_t first_page, int64_t count) {
  std::vector<std::byte*> pages;
  for (int64_t page = first_page; page < first_page + count; ++page) {
    pages.push_back(batch_.pages(part).kept_page(layer, page));
  }
  return parts_.space->compute().upload_pages(pages, gathered_.data(), parts_.plan.group_bytes);
}

Status KeptPages::adopt(int64_t layer, int64_t part, std::vector<int32_t> positions,
                        std::vector<int32_t> float8) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (positions == kept.positions() && float8 == kept.float8()) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(gather(layer, part, {positions}));
  std::vector<int8_t> exponents;
  encode(layer, part, float8, exponents);
  int64_t count = parts_.keep.pages;
  if (parts_.keep.divides_layers) {
    count = batch_.pages(part).hold_kept(layer, static_cast<int64_t>(positions.size()));
  }
  KVSWAP_RETURN_IF_ERROR(write(layer, part, 0, count));
  kept.set_float8(std::move(float8), std::move(exponents));
  kept.set(std::move(positions), options.group_tokens);
  return Status::ok();
}

Status KeptPages::append(int64_t layer, int64_t part, std::span<const int32_t> positions) {
  const int64_t group_tokens = parts_.options.group_tokens;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  std::vector<int32_t> all = kept.positions();
  const auto before = static_cast<int64_t>(all.size());
  all.insert(all.end(), positions.begin(), positions.end());
  const int64_t first_page = before / group_tokens;
  const int64_t in_first = before % group_tokens;
  const int64_t pages = (std::ssize(all) + group_tokens - 1) / group_tokens - first_page;
  KVSWAP_RETURN_IF_ERROR(gather(layer, part, {positions, in_first}));
  for (int64_t slot = 0; slot < in_first; ++slot) put(slot, kept_page(first_page), slot);
  KVSWAP_RETURN_IF_ERROR(write(layer, part, first_page, pages));
  kept.set(std::move(all), group_tokens);
  return Status::ok();
}

/// The tokens of `positions`, packed to gathered_.
Status KeptPages::gather(int64_t layer, int64_t part, const Wanted& wanted) {
  const EngineOptions& options = parts_.options;
  SequencePages& pages = batch_.pages(part);
  const std::vector<int32_t>& kept = pages.kept(layer).positions();
  const int64_t gone = parts_.store->tables().first_group(layer, part) * options.group_tokens;
  const std::span<const int32_t> positions = wanted.positions;
  KVSWAP_RETURN_IF_ERROR(look_at_kept(layer, part));
  gathered_.resize(parts_.keep.layer_pages * parts_.plan.group_bytes);
  decoded_.resize(parts_.plan.group_bytes);
  missing_.clear();
  const std::byte* page = nullptr;
  int64_t group = -1;  // that stands in the page
  for (size_t i = 0; i < positions.size(); ++i) {
    const int64_t to = wanted.first_place + static_cast<int64_t>(i);
    const int64_t place = place_of(kept, positions[i]);
    if (place < std::ssize(kept)) {
      put(to, kept_page(place / options.group_tokens), place % options.group_tokens);
      continue;
    }
    if (positions[i] < gone) {
      put_rounded(layer, part, positions[i], to);
      continue;
    }
    if (positions[i] / options.group_tokens != group) {
      group = positions[i] / options.group_tokens;
      auto in_tail = page_in_tail(layer, part, group);
      if (!in_tail.is_ok()) return in_tail.status();
      page = in_tail.value();
    }
    if (page == nullptr) {
      missing_.push_back(i);
    } else {
      put(to, page, positions[i] % options.group_tokens);
    }
  }
  for (size_t first = 0, end = 0; first < missing_.size(); first = end) {
    KVSWAP_RETURN_IF_ERROR(read_groups(layer, part, wanted, first, end));
  }
  return Status::ok();
}

/// The groups of missing_[first] and the next, as many as a block holds; `end`: where they end.
Status KeptPages::read_groups(int64_t layer, int64_t part, const Wanted& wanted, size_t first,
                              size_t& end) {
  const EngineOptions& options = parts_.options;
  const std::span<const int32_t> positions = wanted.positions;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  KVSWAP_RETURN_IF_ERROR(sealer_.settle_layer(layer));
  fetch_.layer = layer;
  fetch_.loads.clear();
  const auto group_of = [&](size_t i) {
    return positions[missing_[i]] / static_cast<int32_t>(options.group_tokens);
  };
  for (end = first; end < missing_.size(); ++end) {
    const int32_t group = group_of(end);
    if (!fetch_.loads.empty() && fetch_.loads.back().group == group) continue;
    const auto count = static_cast<int64_t>(fetch_.loads.size());
    if (count == most) break;
    std::byte* target = blocks.value().slots[0] + count * parts_.record_bytes();
    fetch_.loads.push_back({part, group, -1, target, nullptr});
  }
  KVSWAP_RETURN_IF_ERROR(parts_.fetcher->submit(fetch_));
  Status arrived = parts_.fetcher->finish(fetch_);
  if (arrived.is_pending()) parts_.fetcher->abandon(fetch_, blocks.value().memory);
  KVSWAP_RETURN_IF_ERROR(arrived);
  std::vector<int8_t> note(parts_.plan.note_bytes);
  size_t i = first;
  for (const Load& load : fetch_.loads) {
    parts_.store->copy_note(layer, part, load.group, note.data());
    const std::byte* page = tokens_of_page(parts_.plan, load.target, note.data(), decoded_.data());
    for (; i < end && group_of(i) == load.group; ++i) {
      put(wanted.first_place + static_cast<int64_t>(missing_[i]), page,
          positions[missing_[i]] % options.group_tokens);
    }
  }
  return Status::ok();
}

/// A sealed group that still stands in the tail's pages, as its record has it; null: it does not.
Result<const std::byte*> KeptPages::page_in_tail(int64_t layer, int64_t part, int64_t group) {
  if (!parts_.keep.kind.joins || group < batch_.layer(layer).first_in_tail) {
    return static_cast<const std::byte*>(nullptr);
  }
  auto page = parts_.space->compute().look_at(tail_.page(layer, part, group),
                                              parts_.plan.group_bytes, tail_copy_);
  if (!page.is_ok() || !parts_.plan.has_float8_records) return page;
  rounded_.resize(parts_.plan.payload_bytes);
  std::vector<int8_t> exponents(parts_.plan.note_bytes);
  encode_page(parts_.plan, page.value(), rounded_.data(), exponents.data());
  return tokens_of_page(parts_.plan, rounded_.data(), exponents.data(), decoded_.data());
}

const std::byte* KeptPages::decoded(int64_t layer, int64_t part, int64_t page) {
  const Status looked_at = look_at_kept(layer, part);
  KVSWAP_ASSERT(looked_at.is_ok());
  return decode(layer, part, page);
}

const std::byte* KeptPages::decode(int64_t layer, int64_t part, int64_t page) {
  const int64_t each = parts_.keep.float8_per_token;
  decoded_.resize(parts_.plan.group_bytes);
  decode_page(
      parts_.plan,
      kept_page(parts_.keep.pages - 1 - page / each) +
          page % each * (parts_.plan.group_bytes / each),
      batch_.pages(part).kept(layer).exponents().data() + page * parts_.plan.page_note_bytes,
      decoded_.data());
  return decoded_.data();
}

/// One that is kept in e4m3 alone, to gathered_ in the model's dtype.
void KeptPages::put_rounded(int64_t layer, int64_t part, int32_t position, int64_t place) {
  const std::vector<int32_t>& float8 = batch_.pages(part).kept(layer).float8();
  const int64_t from = place_of(float8, position);
  KVSWAP_ASSERT(from < std::ssize(float8));
  const int64_t group_tokens = parts_.options.group_tokens;
  put(place, decode(layer, part, from / group_tokens), from % group_tokens);
}

void KeptPages::put(int64_t place, const std::byte* page, int64_t slot) {
  const RecordShape shape = parts_.plan.record_shape;
  std::byte* target = gathered_.data() + place / shape.group_tokens * shape.payload_bytes();
  put_token(shape, target, place % shape.group_tokens, token_of_page(shape, page, slot));
}

/// The tokens of `positions`, all of them kept, to gathered_, from behind.
void KeptPages::encode(int64_t layer, int64_t part, std::span<const int32_t> positions,
                       std::vector<int8_t>& exponents) {
  const EngineOptions& options = parts_.options;
  const RecordShape shape = parts_.plan.record_shape;
  const int64_t group_tokens = options.group_tokens;
  const int64_t each = parts_.keep.float8_per_token;
  const int64_t note_bytes = parts_.plan.page_note_bytes;
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  const auto count = static_cast<int64_t>(positions.size());
  exponents.resize((count + group_tokens - 1) / group_tokens * note_bytes);
  int64_t in_room = -1;  // page that stands in decoded_
  for (int64_t page = 0; page * group_tokens < count; ++page) {
    unencoded_.assign(parts_.plan.group_bytes, std::byte{0});
    for (int64_t i = page * group_tokens; i < std::min(count, (page + 1) * group_tokens); ++i) {
      const int64_t in_float8 = place_of(kept.float8(), positions[i]);
      const bool is_float8 = in_float8 < std::ssize(kept.float8());
      const int64_t place = is_float8 ? in_float8 : place_of(kept.positions(), positions[i]);
      const int64_t from = place / group_tokens;
      if (is_float8 && std::exchange(in_room, from) != from) {
        decode(layer, part, from);
      }
      const std::byte* decoded = is_float8 ? decoded_.data() : kept_page(from);
      put_token(shape, unencoded_.data(), i % group_tokens,
                token_of_page(shape, decoded, place % group_tokens));
    }
    encode_page(parts_.plan, unencoded_.data(),
                gathered_.data() + (parts_.keep.pages - 1 - page / each) * parts_.plan.group_bytes +
                    page % each * (parts_.plan.group_bytes / each),
                exponents.data() + page * note_bytes);
  }
}

}  // namespace kvswap
