#include "engine/dropping.h"

#include <algorithm>
#include <limits>

#include "engine/page_tokens.h"

namespace kvswap {

void Dropping::reserve(Arena& arena, const Plan& plan) {
  if (!plan.drops) return;
  const int64_t group_tokens = plan.options.group_tokens;
  const int64_t pages = plan.sink_pages + plan.keep.tokens_max / group_tokens + 1;
  arena.take(Use::kStaging, pages * (plan.group_bytes + group_tokens * int64_t{sizeof(int32_t)}));
}

void Dropping::drop_past(int64_t layer) {
  const EngineOptions& options = parts_.options;
  if (!parts_.plan.drops) return;
  const int64_t held_bytes = parts_.store->bytes_held();
  const int64_t positions = batch_.layer(layer).positions;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const KeptTokens& kept = batch_.pages(part).kept(layer);
    int64_t end = std::min(batch_.layer(layer).sealed_groups,
                           options.sealed_groups(positions - options.positions_to_crop()));
    if (parts_.plan.keeps_tokens(layer)) {
      if (kept.is_due) continue;
      if (options.keep_interval > 0 || parts_.keep.kind.joins) {
        end = std::min(end, kept.joined_positions / options.group_tokens);
      }
    }
    const bool is_new = end > parts_.store->tables().first_group(layer, part);
    if (is_new && !batch_.fits(layer, part, end)) parts_.store->tables().drop(layer, part, end);
  }
  parts_.ledger.release(Use::kStaging, held_bytes - parts_.store->bytes_held());
}

const LeftTokens& Dropping::left(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  SequencePages& pages = batch_.pages(part);
  const KeptTokens& kept = pages.kept(layer);
  const TokenValidity& validity = batch_.validity(part);
  const int64_t group_tokens = options.group_tokens;
  const int64_t gone = parts_.store->tables().first_group(layer, part) * group_tokens;
  left_.count = 0;
  left_.positions.clear();
  left_.pages.clear();
  const std::vector<int32_t>& sinks = pages.sinks(layer);
  for (size_t sink = 0; sink < sinks.size(); ++sink) {
    if (sinks[sink] * group_tokens >= gone) continue;
    for (uint64_t left = batch_.mask(layer, part, sinks[sink]); left != 0; left &= left - 1) {
      const int64_t slot = __builtin_ctzll(left);
      add(pages.sink_page(layer, static_cast<int64_t>(sink)), slot,
          sinks[sink] * group_tokens + slot);
    }
  }
  const std::vector<int32_t>& in_dtype = kept.positions();
  for (int64_t i = 0; i < std::ssize(in_dtype) && in_dtype[i] < gone; ++i) {
    if (!validity.is_valid(in_dtype[i])) continue;
    add(pages.kept_page(layer, i / group_tokens), i % group_tokens, in_dtype[i]);
  }
  const std::vector<int32_t>& float8 = kept.float8();
  const std::byte* decoded = nullptr;
  for (int64_t i = 0; i < std::ssize(float8) && float8[i] < gone; ++i) {
    if (i % group_tokens == 0) decoded = kept_pages_.decoded(layer, part, i / group_tokens);
    if (!validity.is_valid(float8[i])) continue;
    add(decoded, i % group_tokens, float8[i]);
  }
  return left_;
}

void Dropping::add(const std::byte* page, int64_t slot, int64_t position) {
  const RecordShape shape = parts_.plan.record_shape;
  const int64_t place = left_.count++;
  const int64_t to = place / shape.group_tokens;
  if (place % shape.group_tokens == 0) {
    left_.positions.resize((to + 1) * shape.group_tokens);
    left_.pages.resize((to + 1) * shape.payload_bytes());
  }
  left_.positions[place] = static_cast<int32_t>(position);
  put_token(shape, left_.pages.data() + to * shape.payload_bytes(), place % shape.group_tokens,
            token_of_page(shape, page, slot));
}

void Dropping::forget_gone(int64_t layer, int64_t part, std::span<float> mass) const {
  const int64_t gone =
      parts_.store->tables().first_group(layer, part) * parts_.options.group_tokens;
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  for (int64_t position = 0; position < std::min<int64_t>(gone, std::ssize(mass)); ++position) {
    if (kept.mask(position, 1) == 0) mass[position] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace kvswap
