#include "engine/sequence/batch.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace kvswap {

void Batch::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  SequencePages::reserve(arena, plan, extent);
  arena.take(Use::kTables, size_product({extent.batch, (extent.context + 63) / 64, 8}));
}

Status Batch::begin(int64_t sequences, int64_t tokens) {
  const EngineOptions& options = context_.options;
  if (sequences < 1) {
    return Status::invalid("session: batch must be at least 1, got " +
                           std::to_string(sequences / options.heads_apart));
  }
  if (options.max_batch > 0 && sequences > options.max_batch) {
    return Status::invalid("session: batch must be at most max_batch (" +
                           std::to_string(options.max_batch / options.heads_apart) + "), got " +
                           std::to_string(sequences / options.heads_apart));
  }
  const int64_t context = std::max(tokens, options.max_context);
  KVSWAP_RETURN_IF_ERROR(account_.check_room({sequences, context}));
  spares_.release(sequences);
  KVSWAP_RETURN_IF_ERROR(account_.reserve(sequences, options.sealed_groups(context)));
  KVSWAP_RETURN_IF_ERROR(spares_.grow(sequences));
  while (size() < sequences) pages_.push_back(spares_.take());
  validity_.assign(sequences, {});
  context_.store->tables().set_sequences(sequences);
  context_.selector->summaries().set_sequences(sequences);
  if (context_.clusters != nullptr) context_.clusters->set_sequences(sequences);
  return Status::ok();
}

void Batch::declare(int64_t tokens, const bool* valid) {
  int64_t positions = 0;
  for (const Layer& layer : layers_) positions = std::max(positions, layer.positions);
  for (int64_t sequence = 0; sequence < size(); ++sequence) {
    PaddingMask& validity = validity_[sequence];
    if (validity.positions() > positions) validity.truncate(positions);
    validity.append(tokens, valid + sequence / context_.options.heads_apart * tokens);
  }
}

void Batch::declare_valid(int64_t positions) {
  for (PaddingMask& validity : validity_) {
    if (validity.positions() < positions)
      validity.append(positions - validity.positions(), nullptr);
  }
}

void Batch::select(std::span<const int64_t> indices) {
  std::vector<bool> is_used(pages_.size(), false);
  for (const int64_t index : indices) is_used[index] = true;
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (!is_used[i]) spares_.give(std::move(pages_[i]));
  }

  // The first new sequence that continues an old one takes its memory, further ones copy it.
  std::vector<std::unique_ptr<SequencePages>> selected(indices.size());
  std::vector<SequencePages*> sources(pages_.size(), nullptr);
  std::vector<PaddingMask> validity;
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t index = indices[i];
    validity.push_back(validity_[index]);
    if (sources[index] == nullptr) {
      sources[index] = pages_[index].get();
      selected[i] = std::move(pages_[index]);
    } else {
      selected[i] = spares_.take();
      selected[i]->copy_from(*sources[index]);
    }
  }
  pages_ = std::move(selected);
  validity_ = std::move(validity);
  context_.store->select_sequences(indices);
  context_.selector->summaries().select_sequences(indices);
  if (context_.clusters != nullptr) context_.clusters->select_sequences(indices);
}

void Batch::clear() {
  for (auto& pages : pages_) spares_.give(std::move(pages));
  pages_.clear();
  validity_.clear();
  context_.store->clear();
  context_.selector->clear();
  for (Layer& layer : layers_) layer = {};
}

int64_t Batch::due_groups(int64_t layer, int64_t positions) const {
  return std::max<int64_t>(
      0, context_.options.sealed_groups(positions) - layers_[layer].sealed_groups);
}

void Batch::grow(int64_t layer, int64_t positions) {
  Layer& state = layers_[layer];
  const int64_t newest = (positions - 1) / context_.options.group_tokens;
  state.positions = positions;
  state.first_in_tail = std::max(state.first_in_tail, newest + 1 - context_.plan.tail_pages);
}

uint64_t Batch::mask(int64_t layer, int64_t sequence, int64_t group) const {
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t first = group * group_tokens;
  const int64_t count = std::min(group_tokens, layers_[layer].positions - first);
  return validity_[sequence].mask(first, count);
}

uint64_t Batch::selectable(int64_t layer, int64_t sequence, int64_t group) const {
  const int64_t group_tokens = context_.options.group_tokens;
  const RetainedTokens& retained = pages_[sequence]->retained(layer);
  return mask(layer, sequence, group) & ~retained.mask(group * group_tokens, group_tokens);
}

int64_t Batch::tokens_apart(int64_t layer, int64_t sequence) const {
  int64_t tokens = 0;
  // Where tokens join the next step takes in what was sealed since.
  const int64_t joined =
      pages_[sequence]->retained(layer).admitted_positions / context_.options.group_tokens;
  const int64_t end =
      context_.retention.kind.retains_online ? joined : layers_[layer].sealed_groups;
  for (int64_t group = 0; !fits(layer, sequence) && group < end; ++group) {
    if (is_pinned(layer, sequence, group)) continue;
    tokens += std::popcount(selectable(layer, sequence, group));
  }
  return tokens;
}

bool Batch::is_sink(int64_t sequence, int64_t group) const {
  const EngineOptions& options = context_.options;
  const int64_t first = validity_[sequence].first_valid();
  if (options.sink_tokens == 0 || first >= validity_[sequence].positions()) return false;
  return group >= first / options.group_tokens &&
         group <= (first + options.sink_tokens - 1) / options.group_tokens;
}

bool Batch::is_pinned(int64_t layer, int64_t sequence, int64_t group) const {
  const std::vector<int32_t>& sinks = pages_[sequence]->sinks(layer);
  return std::find(sinks.begin(), sinks.end(), group) != sinks.end();
}

bool Batch::fits(int64_t layer, int64_t sequence, int64_t sealed) const {
  const int64_t padding =
      std::min(sealed, validity_[sequence].first_valid() / context_.options.group_tokens);
  const auto sinks = static_cast<int64_t>(pages_[sequence]->sinks(layer).size());
  return sealed - padding - sinks <= context_.options.groups_max;
}

bool Batch::all_fit(int64_t layer) const {
  for (int64_t sequence = 0; sequence < size(); ++sequence) {
    if (!fits(layer, sequence)) return false;
  }
  return true;
}

void Batch::choosable(int64_t layer, int64_t sequence, int64_t groups,
                      std::vector<int32_t>& chosen) const {
  chosen.clear();
  const int64_t first = validity_[sequence].first_valid() / context_.options.group_tokens;
  for (int64_t group = first; group < groups; ++group) {
    if (!is_pinned(layer, sequence, group) && selectable(layer, sequence, group) != 0) {
      chosen.push_back(static_cast<int32_t>(group));
    }
  }
}

}  // namespace kvswap
