#include "engine/retention/token_eviction.h"

#include <algorithm>
#include <limits>

#include "engine/sequence/token_codec.h"

namespace kvswap {

void TokenEviction::reserve(Arena& arena, const Plan& plan) {
  if (!plan.drops) return;
  const int64_t group_tokens = plan.options.group_tokens;
  const int64_t pages = plan.sink_pages + plan.retention.tokens_max / group_tokens + 1;
  arena.take(Use::kStaging, pages * (plan.group_bytes + group_tokens * int64_t{sizeof(int32_t)}));
}

void TokenEviction::discard_prefix(int64_t layer) {
  const EngineOptions& options = context_.options;
  if (!context_.plan.drops) return;
  const int64_t held_bytes = context_.store->bytes_held();
  const int64_t positions = batch_.layer(layer).positions;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    int64_t end = std::min(batch_.layer(layer).sealed_groups,
                           options.sealed_groups(positions - options.positions_to_crop()));
    if (context_.plan.keeps_tokens(layer)) {
      if (retained.is_due) continue;
      if (options.keep_interval > 0 || context_.retention.kind.retains_online) {
        end = std::min(end, retained.admitted_positions / options.group_tokens);
      }
    }
    const bool is_new = end > context_.store->tables().first_group(layer, sequence);
    if (is_new && !batch_.fits(layer, sequence, end))
      context_.store->tables().drop(layer, sequence, end);
  }
  context_.ledger.release(Use::kStaging, held_bytes - context_.store->bytes_held());
}

const SurvivingTokens& TokenEviction::left(int64_t layer, int64_t sequence) {
  const EngineOptions& options = context_.options;
  SequencePages& pages = batch_.pages(sequence);
  const RetainedTokens& retained = pages.retained(layer);
  const PaddingMask& validity = batch_.validity(sequence);
  const int64_t group_tokens = options.group_tokens;
  const int64_t gone = context_.store->tables().first_group(layer, sequence) * group_tokens;
  left_.count = 0;
  left_.positions.clear();
  left_.pages.clear();
  const std::vector<int32_t>& sinks = pages.sinks(layer);
  for (size_t sink = 0; sink < sinks.size(); ++sink) {
    if (sinks[sink] * group_tokens >= gone) continue;
    for (uint64_t left = batch_.mask(layer, sequence, sinks[sink]); left != 0; left &= left - 1) {
      const int64_t slot = __builtin_ctzll(left);
      add(pages.sink_page(layer, static_cast<int64_t>(sink)), slot,
          sinks[sink] * group_tokens + slot);
    }
  }
  const std::vector<int32_t>& in_dtype = retained.positions();
  for (int64_t i = 0; i < std::ssize(in_dtype) && in_dtype[i] < gone; ++i) {
    if (!validity.is_valid(in_dtype[i])) continue;
    add(pages.retained_page(layer, i / group_tokens), i % group_tokens, in_dtype[i]);
  }
  const std::vector<int32_t>& float8 = retained.float8();
  const std::byte* decoded = nullptr;
  for (int64_t i = 0; i < std::ssize(float8) && float8[i] < gone; ++i) {
    if (i % group_tokens == 0) decoded = retained_pages_.decoded(layer, sequence, i / group_tokens);
    if (!validity.is_valid(float8[i])) continue;
    add(decoded, i % group_tokens, float8[i]);
  }
  return left_;
}

void TokenEviction::add(const std::byte* page, int64_t slot, int64_t position) {
  const RecordShape shape = context_.plan.record_shape;
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

void TokenEviction::mask_discarded(int64_t layer, int64_t sequence, std::span<float> mass) const {
  const int64_t gone =
      context_.store->tables().first_group(layer, sequence) * context_.options.group_tokens;
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  for (int64_t position = 0; position < std::min<int64_t>(gone, std::ssize(mass)); ++position) {
    if (retained.mask(position, 1) == 0) mass[position] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace kvswap
