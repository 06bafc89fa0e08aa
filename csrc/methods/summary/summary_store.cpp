#include "methods/summary/summary_store.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace kvswap {

SummaryStore::SummaryStore(const MethodOptions& options, const SummaryEncoder& rows,
                           std::shared_ptr<SummaryMemory> memory)
    : options_(options), rows_(rows), memory_(std::move(memory)), summaries_(options.layers) {}

bool SummaryStore::is_ready(int64_t layer) const {
  const std::vector<int64_t>& exact = options_.exact_layers;
  return rows_.is_ready(layer) && std::find(exact.begin(), exact.end(), layer) == exact.end();
}

void SummaryStore::start_layer(int64_t layer) {
  summaries_[layer].clear();
  if (!is_ready(layer) || rows_.shape(layer).width == 0) return;
  summaries_[layer].assign(sequences_, KeySummary(shape(layer), memory_));
}

KeySummary::Shape SummaryStore::shape(int64_t layer) const {
  const SummaryShape rows = rows_.shape(layer);
  return {rows.width, chunk_rows(options_.group_tokens, rows.tokens_per_row),
          options_.summary_dtype, options_.first_columns(rows.width)};
}

void SummaryStore::set_sequences(int64_t sequences) {
  sequences_ = sequences;
  for (int64_t layer = 0; layer < options_.layers; ++layer) start_layer(layer);
}

void SummaryStore::select_sequences(std::span<const int64_t> indices) {
  sequences_ = static_cast<int64_t>(indices.size());
  for (std::vector<KeySummary>& summaries : summaries_) {
    if (summaries.empty()) continue;
    std::vector<KeySummary> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) selected.push_back(summaries.at(index));
    summaries = std::move(selected);
  }
}

int64_t SummaryStore::tokens(int64_t layer) const {
  const auto& summaries = summaries_.at(layer);
  return summaries.empty() ? 0 : summaries.front().rows() * rows_.shape(layer).tokens_per_row;
}

int64_t SummaryStore::bytes_to_append(int64_t layer, int64_t tokens) const {
  int64_t bytes = 0;
  std::set<const KeySummary::Chunk*> settled;
  for (const KeySummary& summary : summaries_[layer]) {
    bytes += summary.bytes_to_append(tokens / rows_.shape(layer).tokens_per_row, &settled);
  }
  return bytes;
}

Status SummaryStore::append(const SealedKeys& sealed, std::vector<SummarySlice>& pieces) {
  KVSWAP_ASSERT(is_ready(sealed.layer));
  if (rows_.shape(sealed.layer).width == 0) return Status::ok();
  const int64_t each = rows_.shape(sealed.layer).tokens_per_row;
  KeySummary& summary = summaries_[sealed.layer][sealed.sequence];
  const int64_t first_position = summary.rows() * each;
  return summary.append(sealed.tokens / each, [&](KeySummary::Chunk& chunk, int64_t first_row,
                                                  int64_t first_new_row, int64_t count) {
    const int64_t first = first_new_row * each;
    SummarySlice piece;
    piece.sequence = sealed.sequence;
    piece.keys = sealed.keys;
    piece.keys.data = static_cast<const std::byte*>(sealed.keys.data) +
                      first * sealed.keys.token_stride * dtype_bytes(sealed.keys.dtype);
    piece.tokens = count * each;
    piece.valid = sealed.valid;
    piece.first_token = first_position + first;
    piece.rows = chunk.rows.data();
    piece.rest = chunk.rest.data();
    piece.rest_columns = summary.shape().rest_columns();
    piece.row_scale = chunk.token_scale.empty() ? nullptr : chunk.token_scale.data();
    piece.first_row = first_row;
    pieces.push_back(piece);
  });
}

Result<SummarySlice> SummaryStore::rewrite(const ChangedKeys& changed) {
  KVSWAP_ASSERT(rows_.shape(changed.layer).tokens_per_row == options_.group_tokens);
  KeySummary& summary = summaries_[changed.layer][changed.sequence];
  auto chunk = summary.own_chunk_of(changed.group);
  if (!chunk.is_ok()) return chunk.status();
  SummarySlice piece;
  piece.sequence = changed.sequence;
  piece.keys = changed.keys;
  piece.tokens = options_.group_tokens;
  piece.first_token = changed.group * options_.group_tokens;
  piece.counted = changed.counted;
  piece.rows = chunk.value()->rows.data();
  piece.rest = chunk.value()->rest.data();
  piece.rest_columns = summary.shape().rest_columns();
  const auto& scales = chunk.value()->token_scale;
  piece.row_scale = scales.empty() ? nullptr : scales.data();
  piece.first_row = changed.group % summary.shape().chunk_tokens;
  return piece;
}

int64_t SummaryStore::bytes_to_rewrite(int64_t layer, int64_t sequence, int64_t group) const {
  return summaries_[layer][sequence].bytes_to_own(group);
}

void SummaryStore::truncate(int64_t layer, int64_t tokens) {
  const int64_t rows = tokens / rows_.shape(layer).tokens_per_row;
  for (KeySummary& summary : summaries_.at(layer)) {
    if (summary.rows() > rows) summary.truncate(rows);
  }
}

void SummaryStore::share(int64_t layer, SummaryStore& other) {
  std::vector<KeySummary>& theirs = other.summaries_[layer];
  KVSWAP_ASSERT(tokens(layer) == 0 && theirs.size() == summaries_[layer].size());
  std::map<const KeySummary::Chunk*, std::shared_ptr<KeySummary::Chunk>> shared;
  for (size_t sequence = 0; sequence < theirs.size(); ++sequence) {
    KeySummary& mine = summaries_[layer][sequence];
    std::vector<std::shared_ptr<KeySummary::Chunk>> chunks;
    for (int64_t i = 0; i < theirs[sequence].chunks(); ++i) {
      KeySummary::Chunk& chunk = theirs[sequence].chunk(i);
      auto& known = shared[&chunk];
      if (known == nullptr) known = mine.share_chunk(chunk);
      chunks.push_back(known);
    }
    mine.take(std::move(chunks), theirs[sequence].rows());
  }
}

int64_t SummaryStore::bytes(int64_t layer) const {
  std::set<const KeySummary::Chunk*> counted;
  int64_t bytes = 0;
  for (const KeySummary& summary : summaries_[layer]) {
    for (int64_t i = 0; i < summary.chunks(); ++i) {
      const KeySummary::Chunk& chunk = summary.chunk(i);
      if (counted.insert(&chunk).second) bytes += summary.bytes_of(chunk);
    }
  }
  return bytes;
}

}  // namespace kvswap
