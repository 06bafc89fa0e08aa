#include "engine/retention/retained_pages.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/sequence/token_codec.h"

namespace kvswap {
namespace {

/// Where a position stands among some that rise; their number: it does not.
int64_t place_of(const std::vector<int32_t>& positions, int32_t position) {
  const auto found = std::lower_bound(positions.begin(), positions.end(), position);
  if (found == positions.end() || *found != position) return std::ssize(positions);
  return found - positions.begin();
}

}  // namespace

void RetainedPages::reserve(Arena& arena, const Plan& plan) {
  const RetentionPlan& retention = plan.retention;
  if (retention.pages == 0) return;
  const int64_t loads = 2 * plan.past_block_groups * Fetch::bytes_per_load();
  // A record, and a page that is encoded.
  const int64_t rounded = retention.kind.retains_online ? 2 * plan.group_bytes : 0;
  const int64_t copies = plan.options.device
                             ? retention.pages * plan.token_page_bytes +
                                   (retention.kind.retains_online ? plan.group_bytes : 0)
                             : 0;
  arena.take(Use::kStaging, loads + rounded + copies +
                                (retention.layer_pages + 1) * plan.group_bytes +
                                retention.in_dtype_max * int64_t{sizeof(size_t)});
}

/// Before they are read: they stand until they are written.
Status RetainedPages::map_retained(int64_t layer, int64_t sequence) {
  const int64_t bytes = context_.retention.pages * context_.plan.token_page_bytes;
  SequencePages& pages = batch_.pages(sequence);
  divided_ = &pages;
  layer_ = layer;
  if (context_.retention.has_layer_budgets) return Status::ok();
  if (pages.retained(layer).count() == 0) return Status::ok();
  auto seen =
      context_.space->compute().map_for_host(pages.retained_page(layer, 0), bytes, retained_copy_);
  if (!seen.is_ok()) return seen.status();
  retained_ = seen.value();
  return Status::ok();
}

const std::byte* RetainedPages::retained_page(int64_t page) const {
  if (context_.retention.has_layer_budgets) return divided_->retained_page(layer_, page);
  return retained_ + page * context_.plan.token_page_bytes;
}

/// The first of what was gathered becomes retained pages.
Status RetainedPages::write(int64_t layer, int64_t sequence, int64_t first_page, int64_t count) {
  std::vector<std::byte*> pages;
  for (int64_t page = first_page; page < first_page + count; ++page) {
    pages.push_back(batch_.pages(sequence).retained_page(layer, page));
  }
  return context_.space->compute().upload_pages(pages, gathered_.data(), context_.plan.group_bytes);
}

Status RetainedPages::adopt(int64_t layer, int64_t sequence, std::vector<int32_t> positions,
                            std::vector<int32_t> float8) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (positions == retained.positions() && float8 == retained.float8()) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(gather(layer, sequence, {positions}));
  std::vector<int8_t> exponents;
  encode(layer, sequence, float8, exponents);
  int64_t count = context_.retention.pages;
  if (context_.retention.has_layer_budgets) {
    count = batch_.pages(sequence).hold_retained(layer, static_cast<int64_t>(positions.size()));
  }
  KVSWAP_RETURN_IF_ERROR(write(layer, sequence, 0, count));
  retained.set_float8(std::move(float8), std::move(exponents));
  retained.set(std::move(positions), options.group_tokens);
  return Status::ok();
}

Status RetainedPages::append(int64_t layer, int64_t sequence, std::span<const int32_t> positions) {
  const int64_t group_tokens = context_.options.group_tokens;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  std::vector<int32_t> all = retained.positions();
  const auto before = static_cast<int64_t>(all.size());
  all.insert(all.end(), positions.begin(), positions.end());
  const int64_t first_page = before / group_tokens;
  const int64_t in_first = before % group_tokens;
  const int64_t pages = (std::ssize(all) + group_tokens - 1) / group_tokens - first_page;
  KVSWAP_RETURN_IF_ERROR(gather(layer, sequence, {positions, in_first}));
  for (int64_t slot = 0; slot < in_first; ++slot) put(slot, retained_page(first_page), slot);
  KVSWAP_RETURN_IF_ERROR(write(layer, sequence, first_page, pages));
  retained.set(std::move(all), group_tokens);
  return Status::ok();
}

/// The tokens of `positions`, packed to gathered_.
Status RetainedPages::gather(int64_t layer, int64_t sequence, const Wanted& wanted) {
  const EngineOptions& options = context_.options;
  SequencePages& pages = batch_.pages(sequence);
  const std::vector<int32_t>& retained = pages.retained(layer).positions();
  const int64_t gone = context_.store->tables().first_group(layer, sequence) * options.group_tokens;
  const std::span<const int32_t> positions = wanted.positions;
  KVSWAP_RETURN_IF_ERROR(map_retained(layer, sequence));
  gathered_.resize(context_.retention.layer_pages * context_.plan.group_bytes);
  decoded_.resize(context_.plan.group_bytes);
  missing_.clear();
  const std::byte* page = nullptr;
  int64_t group = -1;  // that stands in the page
  for (size_t i = 0; i < positions.size(); ++i) {
    const int64_t to = wanted.first_place + static_cast<int64_t>(i);
    const int64_t place = place_of(retained, positions[i]);
    if (place < std::ssize(retained)) {
      put(to, retained_page(place / options.group_tokens), place % options.group_tokens);
      continue;
    }
    if (positions[i] < gone) {
      put_rounded(layer, sequence, positions[i], to);
      continue;
    }
    if (positions[i] / options.group_tokens != group) {
      group = positions[i] / options.group_tokens;
      auto in_tail = page_in_tail(layer, sequence, group);
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
    KVSWAP_RETURN_IF_ERROR(read_groups(layer, sequence, wanted, first, end));
  }
  return Status::ok();
}

/// The groups of missing_[first] and the next, as many as a block holds; `end`: where they end.
Status RetainedPages::read_groups(int64_t layer, int64_t sequence, const Wanted& wanted,
                                  size_t first, size_t& end) {
  const EngineOptions& options = context_.options;
  const std::span<const int32_t> positions = wanted.positions;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  KVSWAP_RETURN_IF_ERROR(sealer_.drain_layer(layer));
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
    std::byte* target = blocks.value().slots[0] + count * context_.record_bytes();
    fetch_.loads.push_back({.sequence = sequence, .group = group, .target = target});
  }
  KVSWAP_RETURN_IF_ERROR(context_.fetcher->submit(fetch_));
  Status arrived = context_.fetcher->finish(fetch_);
  if (arrived.is_pending()) context_.fetcher->abandon(fetch_, blocks.value().memory);
  KVSWAP_RETURN_IF_ERROR(arrived);
  std::vector<int8_t> note(context_.plan.note_bytes);
  size_t i = first;
  for (const Load& load : fetch_.loads) {
    context_.store->copy_note(layer, sequence, load.group, note.data());
    const std::byte* page =
        tokens_of_page(context_.plan, load.target, note.data(), decoded_.data());
    for (; i < end && group_of(i) == load.group; ++i) {
      put(wanted.first_place + static_cast<int64_t>(missing_[i]), page,
          positions[missing_[i]] % options.group_tokens);
    }
  }
  return Status::ok();
}

/// A sealed group that still stands in the tail's pages, as its record has it; null: it does not.
Result<const std::byte*> RetainedPages::page_in_tail(int64_t layer, int64_t sequence,
                                                     int64_t group) {
  if (!context_.retention.kind.retains_online || group < batch_.layer(layer).first_in_tail) {
    return static_cast<const std::byte*>(nullptr);
  }
  auto page = context_.space->compute().map_for_host(batch_.pages(sequence).tail_page(layer, group),
                                                     context_.plan.group_bytes, tail_copy_);
  if (!page.is_ok()) return page;
  if (const RecordPacking* packing = context_.store->form().packing.get()) {
    rounded_.resize(packing->payload_bytes());
    packing->pack(page.value(), rounded_.data());
    packing->unpack(rounded_.data(), decoded_.data());
    return static_cast<const std::byte*>(decoded_.data());
  }
  if (!context_.plan.has_float8_records) return page;
  rounded_.resize(context_.plan.payload_bytes);
  std::vector<int8_t> exponents(context_.plan.note_bytes);
  encode_page(context_.plan, page.value(), rounded_.data(), exponents.data());
  return tokens_of_page(context_.plan, rounded_.data(), exponents.data(), decoded_.data());
}

const std::byte* RetainedPages::decoded(int64_t layer, int64_t sequence, int64_t page) {
  const Status looked_at = map_retained(layer, sequence);
  KVSWAP_ASSERT(looked_at.is_ok());
  return decode(layer, sequence, page);
}

const std::byte* RetainedPages::decode(int64_t layer, int64_t sequence, int64_t page) {
  const int64_t each = context_.retention.float8_per_token;
  decoded_.resize(context_.plan.group_bytes);
  decode_page(context_.plan,
              retained_page(context_.retention.pages - 1 - page / each) +
                  page % each * (context_.plan.group_bytes / each),
              batch_.pages(sequence).retained(layer).exponents().data() +
                  page * context_.plan.page_note_bytes,
              decoded_.data());
  return decoded_.data();
}

/// One that is kept in e4m3 alone, to gathered_ in the model's dtype.
void RetainedPages::put_rounded(int64_t layer, int64_t sequence, int32_t position, int64_t place) {
  const std::vector<int32_t>& float8 = batch_.pages(sequence).retained(layer).float8();
  const int64_t from = place_of(float8, position);
  KVSWAP_ASSERT(from < std::ssize(float8));
  const int64_t group_tokens = context_.options.group_tokens;
  put(place, decode(layer, sequence, from / group_tokens), from % group_tokens);
}

void RetainedPages::put(int64_t place, const std::byte* page, int64_t slot) {
  const RecordShape shape = context_.plan.record_shape;
  std::byte* target = gathered_.data() + place / shape.group_tokens * shape.payload_bytes();
  put_token(shape, target, place % shape.group_tokens, token_of_page(shape, page, slot));
}

/// The tokens of `positions`, all of them kept, to gathered_, from behind.
void RetainedPages::encode(int64_t layer, int64_t sequence, std::span<const int32_t> positions,
                           std::vector<int8_t>& exponents) {
  const EngineOptions& options = context_.options;
  const RecordShape shape = context_.plan.record_shape;
  const int64_t group_tokens = options.group_tokens;
  const int64_t each = context_.retention.float8_per_token;
  const int64_t note_bytes = context_.plan.page_note_bytes;
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const auto count = static_cast<int64_t>(positions.size());
  exponents.resize((count + group_tokens - 1) / group_tokens * note_bytes);
  int64_t in_room = -1;  // page that stands in decoded_
  for (int64_t page = 0; page * group_tokens < count; ++page) {
    unencoded_.assign(context_.plan.group_bytes, std::byte{0});
    for (int64_t i = page * group_tokens; i < std::min(count, (page + 1) * group_tokens); ++i) {
      const int64_t in_float8 = place_of(retained.float8(), positions[i]);
      const bool is_float8 = in_float8 < std::ssize(retained.float8());
      const int64_t place = is_float8 ? in_float8 : place_of(retained.positions(), positions[i]);
      const int64_t from = place / group_tokens;
      if (is_float8 && std::exchange(in_room, from) != from) {
        decode(layer, sequence, from);
      }
      const std::byte* decoded = is_float8 ? decoded_.data() : retained_page(from);
      put_token(shape, unencoded_.data(), i % group_tokens,
                token_of_page(shape, decoded, place % group_tokens));
    }
    encode_page(context_.plan, unencoded_.data(),
                gathered_.data() +
                    (context_.retention.pages - 1 - page / each) * context_.plan.group_bytes +
                    page % each * (context_.plan.group_bytes / each),
                exponents.data() + page * note_bytes);
  }
}

}  // namespace kvswap
