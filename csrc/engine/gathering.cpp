// How the bytes of kept tokens come together.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/keeping.h"

namespace kvswap {

/// The tokens of `columns`, packed to gathered_: from where they are kept now, or from the file.
Status Keeping::gather(int64_t layer, int64_t part, std::span<const int32_t> columns) {
  const EngineOptions& options = parts_.options;
  SequencePages& pages = batch_.pages(part);
  const std::vector<int32_t>& kept = pages.kept(layer).columns();
  const int64_t gone = parts_.store->first_group(layer, part) * options.group_tokens;
  gathered_.resize(options.kept_pages() * options.group_bytes());
  decoded_.resize(options.group_bytes());
  missing_.clear();
  const std::byte* page = nullptr;
  int64_t group = -1;  // that stands in the page
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto to = static_cast<int64_t>(i);
    const auto found = std::lower_bound(kept.begin(), kept.end(), columns[i]);
    if (found != kept.end() && *found == columns[i]) {
      const int64_t place = found - kept.begin();
      put(to, pages.kept_page(layer, place / options.group_tokens), place % options.group_tokens);
      continue;
    }
    if (columns[i] < gone) {
      put_rounded(layer, part, columns[i], to);
      continue;
    }
    if (columns[i] / options.group_tokens != group) {
      group = columns[i] / options.group_tokens;
      page = page_in_tail(layer, part, group);
    }
    if (page == nullptr) {
      missing_.push_back(i);
    } else {
      put(to, page, columns[i] % options.group_tokens);
    }
  }
  for (size_t first = 0, end = 0; first < missing_.size(); first = end) {
    KVSWAP_RETURN_IF_ERROR(read_groups(layer, part, columns, first, end));
  }
  return Status::ok();
}

/// One that is kept in e4m3 alone, to gathered_ in the model's dtype.
void Keeping::put_rounded(int64_t layer, int64_t part, int32_t column, int64_t place) {
  const EngineOptions& options = parts_.options;
  SequencePages& pages = batch_.pages(part);
  const KeptTokens& kept = pages.kept(layer);
  const std::vector<int32_t>& float8 = kept.float8();
  const auto found = std::lower_bound(float8.begin(), float8.end(), column);
  KVSWAP_ASSERT(found != float8.end() && *found == column);
  const int64_t from = found - float8.begin();
  const int64_t page = from / options.group_tokens;
  unencoded_.resize(options.group_bytes());
  decode_page(options, pages.kept_float8_page(layer, page),
              kept.exponents().data() + page * options.page_note_bytes(), unencoded_.data());
  put(place, unencoded_.data(), from % options.group_tokens);
}

/// The tokens of `columns`, all of them kept, to gathered_, from behind.
void Keeping::encode_kept(int64_t layer, int64_t part, std::span<const int32_t> columns,
                          std::vector<int8_t>& exponents) {
  const EngineOptions& options = parts_.options;
  const int64_t group_tokens = options.group_tokens;
  const int64_t each = options.float8_per_token();
  const int64_t note_bytes = options.page_note_bytes();
  SequencePages& pages = batch_.pages(part);
  const KeptTokens& kept = pages.kept(layer);
  const auto count = static_cast<int64_t>(columns.size());
  exponents.resize((count + group_tokens - 1) / group_tokens * note_bytes);
  int64_t decoded = -1;  // page that stands in decoded_
  for (int64_t page = 0; page * group_tokens < count; ++page) {
    unencoded_.assign(options.group_bytes(), std::byte{0});
    for (int64_t i = page * group_tokens; i < std::min(count, (page + 1) * group_tokens); ++i) {
      const std::vector<int32_t>& in_dtype = kept.columns();
      const std::vector<int32_t>& float8 = kept.float8();
      const auto found = std::lower_bound(float8.begin(), float8.end(), columns[i]);
      const bool is_float8 = found != float8.end() && *found == columns[i];
      const int64_t place =
          is_float8
              ? found - float8.begin()
              : std::lower_bound(in_dtype.begin(), in_dtype.end(), columns[i]) - in_dtype.begin();
      const int64_t from = place / group_tokens;
      if (is_float8 && std::exchange(decoded, from) != from) {
        decode_page(options, pages.kept_float8_page(layer, from),
                    kept.exponents().data() + from * note_bytes, decoded_.data());
      }
      copy_token(unencoded_.data(), i % group_tokens,
                 is_float8 ? decoded_.data() : pages.kept_page(layer, from), place % group_tokens);
    }
    encode_page(options, unencoded_.data(),
                gathered_.data() +
                    (options.kept_pages() - 1 - page / each) * options.group_bytes() +
                    page % each * (options.group_bytes() / each),
                exponents.data() + page * note_bytes);
  }
}

/// The groups of missing_[first] and the next, as many as a block holds; `end`: where they end.
Status Keeping::read_groups(int64_t layer, int64_t part, std::span<const int32_t> columns,
                            size_t first, size_t& end) {
  const EngineOptions& options = parts_.options;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  KVSWAP_RETURN_IF_ERROR(sealer_.settle_layer(layer));
  fetch_.layer = layer;
  fetch_.loads.clear();
  const auto group_of = [&](size_t i) {
    return columns[missing_[i]] / static_cast<int32_t>(options.group_tokens);
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
  std::vector<int8_t> note(options.note_bytes());
  size_t i = first;
  for (const Load& load : fetch_.loads) {
    parts_.store->copy_note(layer, part, load.group, note.data());
    const std::byte* page = tokens_of_page(options, load.target, note.data(), decoded_.data());
    for (; i < end && group_of(i) == load.group; ++i) {
      put(static_cast<int64_t>(missing_[i]), page, columns[missing_[i]] % options.group_tokens);
    }
  }
  return Status::ok();
}

/// Token `slot` of a page becomes kept token `place`.
void Keeping::put(int64_t place, const std::byte* page, int64_t slot) {
  const int64_t group_tokens = parts_.options.group_tokens;
  copy_token(gathered_.data() + place / group_tokens * parts_.options.group_bytes(),
             place % group_tokens, page, slot);
}

void Keeping::copy_token(std::byte* target, int64_t place, const std::byte* page,
                         int64_t slot) const {
  const EngineOptions& options = parts_.options;
  const int64_t row = options.head_dim * dtype_bytes(options.dtype);
  const int64_t group_tokens = options.group_tokens;
  for (int64_t side = 0; side < 2 * options.record_shape().kv_heads; ++side) {  // K and V of a head
    std::memcpy(target + (side * group_tokens + place) * row,
                page + (side * group_tokens + slot) * row, row);
  }
}

/// A sealed group that still stands in the tail's pages, as its record has it; null: it does not.
const std::byte* Keeping::page_in_tail(int64_t layer, int64_t part, int64_t group) {
  const EngineOptions& options = parts_.options;
  if (!joins() || group < batch_.layer(layer).first_in_tail) return nullptr;
  const std::byte* page = tail_.page(layer, part, group);
  if (!options.has_float8_records()) return page;
  rounded_.resize(options.payload_bytes());
  std::vector<int8_t> exponents(options.note_bytes());
  encode_page(options, page, rounded_.data(), exponents.data());
  return tokens_of_page(options, rounded_.data(), exponents.data(), decoded_.data());
}

}  // namespace kvswap
