#include "engine/clusters/token_locator.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "methods/clusters/cluster_selector.h"
#include "methods/summary/group_encoder.h"

namespace kvswap {

TokenBytes token_of(const RecordShape& shape, const KeyValueView& tokens, int64_t sequence,
                    int64_t token) {
  const int64_t bytes = shape.element_bytes;
  const int64_t first_value = sequence / tokens.heads_apart * tokens.value_batch_stride +
                              sequence % tokens.heads_apart * tokens.value_head_stride;
  const auto* keys = static_cast<const std::byte*>(tokens.keys);
  const auto* values = static_cast<const std::byte*>(tokens.values);
  return {keys + (tokens.first_key(sequence) + token * tokens.key_token_stride) * bytes,
          values + (first_value + token * tokens.value_token_stride) * bytes,
          tokens.key_head_stride * bytes, tokens.value_head_stride * bytes};
}

TokenLocator::TokenLocator(EngineContext& context, const Batch& batch, int64_t layer,
                           int64_t sequence)
    : context_(context),
      batch_(batch),
      layer_(layer),
      sequence_(sequence),
      row_(context.clusters->of(layer, sequence)) {}

const std::byte* TokenLocator::page(int64_t slot) const {
  const auto found = read_.find(slot);
  if (found != read_.end()) return found->second;
  SequencePages& pages = batch_.pages(sequence_);
  const int32_t page =
      pages.map(layer_).find(context_.store->key(layer_, sequence_, page_id(slot)));
  return page < 0 ? nullptr : pages.page(page);
}

bool TokenLocator::is_in_memory(int64_t token) const {
  const int32_t place = row_.pages.place(token);
  return place < 0 || page(place / row_.pages.page_tokens()) != nullptr;
}

bool TokenLocator::are_in_memory(std::span<const int64_t> tokens) const {
  return std::ranges::all_of(tokens, [this](int64_t token) { return is_in_memory(token); });
}

bool TokenLocator::has_pages_in_memory(int64_t cluster, Of pages) const {
  bool has_all = true;
  row_.pages.each_page(cluster, [&](int64_t slot) {
    const bool is_full = std::popcount(row_.pages.mask(slot)) == row_.pages.page_tokens();
    if (is_full && pages == Of::kPagesWithRoom) return;
    has_all = has_all && page(slot) != nullptr;
  });
  return has_all;
}

std::byte* TokenLocator::waiting_page(int64_t place) const {
  return pages().waiting_page(layer_, place / row_.pages.page_tokens());
}

TokenBytes TokenLocator::at(int64_t token) const {
  const RecordShape shape = context_.plan.record_shape;
  const int64_t page_tokens = row_.pages.page_tokens();
  const int32_t place = row_.pages.place(token);
  if (place >= 0) return token_of_page(shape, page(place / page_tokens), place % page_tokens);
  const int64_t waits = row_.pages.waiting_at(token);
  if (waits >= 0) return token_of_page(shape, waiting_page(waits), waits % page_tokens);
  return arriving_(token);
}

const float* TokenLocator::key(int64_t token) const {
  std::unique_ptr<float[]>& key = keys_[token];
  if (key == nullptr) {
    const RecordShape shape = context_.plan.record_shape;
    key = std::make_unique_for_overwrite<float[]>(shape.kv_heads * shape.head_dim);
    copy_key(at(token), key.get());
  }
  return key.get();
}

void TokenLocator::copy_key(const TokenBytes& token, float* target) const {
  const RecordShape shape = context_.plan.record_shape;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    with_elements(token.key + head * token.key_head_stride, context_.options.dtype,
                  [&](const auto* values) {
                    for (int64_t d = 0; d < shape.head_dim; ++d) *target++ = to_float(values[d]);
                  });
  }
}

void end_wait(const RecordShape& shape, SequencePages& pages, int64_t layer, ClusterPages& row,
              int64_t token) {
  const int64_t to = row.waiting_at(token);
  const int64_t from = row.end_wait(token);
  if (from == to) return;
  const int64_t page_tokens = row.page_tokens();
  const std::byte* page = pages.waiting_page(layer, from / page_tokens);
  put_token(shape, pages.waiting_page(layer, to / page_tokens), to % page_tokens,
            token_of_page(shape, page, from % page_tokens));
}

void release_slots(EngineContext& context, SequencePages& pages, int64_t layer, int64_t sequence,
                   std::span<const int32_t> slots) {
  for (const int32_t slot : slots) {
    pages.map(layer).forget(context.store->key(layer, sequence, page_id(slot)));
    context.store->tables().set_page(layer, sequence, page_id(slot), RecordTables::kNoRecord);
  }
}

void truncate_clusters(EngineContext& context, const Batch& batch, int64_t layer, int64_t tokens) {
  if (context.clusters_of(layer) == nullptr) return;
  const RecordShape shape = context.plan.record_shape;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    ClusterRow& row = context.clusters->of(layer, sequence);
    SequencePages& pages = batch.pages(sequence);
    const std::vector<int64_t> waiting(row.pages.waiting().begin(), row.pages.waiting().end());
    for (const int64_t token : waiting) {
      if (token >= tokens) end_wait(shape, pages, layer, row.pages, token);
    }
    release_slots(context, pages, layer, sequence, row.truncate(tokens));
  }
}

}  // namespace kvswap
