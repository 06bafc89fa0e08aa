#include "engine/step/page_table.h"

#include <algorithm>
#include <utility>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {

/// Retained tokens that have become padding since they were chosen.
void PageTable::hide_later_padding(const Apart& first, const PaddingMask& validity,
                                   const RetainedTokens& retained) {
  const int64_t group_tokens = context_.options.group_tokens;
  const auto hide = [&](int64_t entry, const std::vector<int32_t>& positions, int64_t token) {
    const auto found = std::ranges::lower_bound(positions, token);
    if (found == positions.end() || *found != token) return;
    const int64_t place = found - positions.begin();
    masks_[entry + place / group_tokens] &= ~(uint64_t{1} << (place % group_tokens));
  };
  for (const int64_t token : validity.later_padding()) {
    hide(first.retained, retained.positions(), token);
    hide(first.float8, retained.float8(), token);
  }
}

/// The same of tokens in clusters, and of those that wait for theirs.
void PageTable::hide_later_padding(const Apart& first, const PaddingMask& validity,
                                   const ClusterRow& row, const std::vector<int32_t>& chosen) {
  const int64_t group_tokens = context_.options.group_tokens;
  for (const int64_t token : validity.later_padding()) {
    if (token >= row.clusters.left()) break;  // in the tail yet
    const int64_t waiting = row.pages.waiting_at(token);
    if (waiting >= 0) {
      const uint64_t bit = uint64_t{1} << (waiting % group_tokens);
      masks_[first.waiting + waiting / group_tokens] &= ~bit;
    }
    const int64_t place = row.pages.place(token);
    if (place < 0) continue;
    const int64_t page_tokens = row.pages.page_tokens();
    const auto page = std::ranges::find(chosen, page_id(place / page_tokens));
    if (page == chosen.end()) continue;
    masks_[first.chosen + (page - chosen.begin())] &= ~(uint64_t{1} << (place % page_tokens));
  }
}

void PageTable::see_only(int64_t layer, std::vector<std::vector<int32_t>> positions) {
  seen_layer_ = layer;
  seen_ = std::move(positions);
}

void PageTable::hide_unseen(int64_t sequence) {
  const int64_t first = sequence * context_.plan.pages_per_layer;
  for (int64_t entry = first; entry < first + counts_[sequence]; ++entry) {
    const int64_t begin = positions_[entry];
    uint64_t seen = 0;
    auto next = std::ranges::lower_bound(seen_[sequence], begin);
    for (; next != seen_[sequence].end() && *next < begin + context_.options.group_tokens; ++next) {
      seen |= uint64_t{1} << (*next - begin);
    }
    masks_[entry] &= seen;
  }
}

void PageTable::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  arena.take(Use::kScratch,
             size_product({extent.batch, plan.pages_per_layer, 20 + plan.page_note_bytes}));
}

void PageTable::build(int64_t layer, int64_t queries, const LayerStep& step) {
  const int64_t pages_max = context_.plan.pages_per_layer;
  const int64_t note_bytes = context_.plan.page_note_bytes;
  const ClusterStore* clusters = context_.clusters_of(layer);
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t groups = (state.positions + group_tokens - 1) / group_tokens;
  pages_.resize(batch_.size() * pages_max);
  masks_.resize(batch_.size() * pages_max);
  positions_.resize(batch_.size() * pages_max);
  exponents_.assign(batch_.size() * pages_max * note_bytes, kNotFloat8);
  counts_.assign(batch_.size(), 0);
  query_positions_.assign(batch_.size(), static_cast<int32_t>(state.positions - queries));
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    SequencePages& pages = batch_.pages(sequence);
    int64_t entry = sequence * pages_max;
    const auto add = [&](int64_t group, const std::byte* page) {
      pages_[entry] = page;
      masks_[entry] = batch_.mask(layer, sequence, group);
      positions_[entry] = static_cast<int32_t>(group * group_tokens);
      ++entry;
    };
    // Sinks hold the first valid tokens, so no chosen group comes before them.
    const std::vector<int32_t>& sinks = pages.sinks(layer);
    for (size_t i = 0; i < sinks.size(); ++i) {
      add(sinks[i], pages.sink_page(layer, static_cast<int64_t>(i)));
    }
    const RetainedTokens& retained = pages.retained(layer);
    int64_t before = 0;  // slots of pages that are no group's
    const auto add_apart = [&](const std::byte* page, uint64_t mask) {
      before += group_tokens;
      pages_[entry] = page;
      masks_[entry] = mask;
      positions_[entry] = static_cast<int32_t>(-before);
      ++entry;
    };
    const auto add_retained = [&](const std::byte* page, int64_t tokens) {
      add_apart(page, ~uint64_t{0} >> (64 - std::min(group_tokens, tokens)));
    };
    Apart first = {.retained = entry};
    const auto in_dtype = static_cast<int64_t>(retained.positions().size());
    for (int64_t done = 0; done < in_dtype; done += group_tokens) {
      add_retained(pages.retained_page(layer, done / group_tokens), in_dtype - done);
    }
    first.float8 = entry;
    const auto in_float8 = static_cast<int64_t>(retained.float8().size());
    for (int64_t done = 0; done < in_float8; done += group_tokens) {
      const int64_t page = done / group_tokens;
      std::copy_n(retained.exponents().begin() + page * note_bytes, note_bytes,
                  exponents_.begin() + entry * note_bytes);
      add_retained(pages.retained_float8_page(layer, page), in_float8 - done);
    }
    const PaddingMask& validity = batch_.validity(sequence);
    hide_later_padding(first, validity, retained);
    const std::vector<int32_t>& chosen = step.chosen()[sequence];
    const bool chose_clusters = clusters != nullptr && !batch_.fits(layer, sequence) &&
                                (chosen.empty() || is_page_id(chosen.front()));
    if (chose_clusters) {
      const ClusterPages& of_row = clusters->of(layer, sequence).pages;
      const int64_t waiting = std::ssize(of_row.waiting());
      first.waiting = entry;
      for (int64_t done = 0; done < waiting; done += group_tokens) {
        add_retained(pages.waiting_page(layer, done / group_tokens), waiting - done);
      }
      first.chosen = entry;
      for (size_t i = 0; i < chosen.size(); ++i) {
        add_apart(pages.page(step.pages()[sequence][i]), of_row.mask(slot_of_page(chosen[i])));
      }
      hide_later_padding(first, validity, clusters->of(layer, sequence), chosen);
    }
    for (size_t i = 0; i < chosen.size() && !is_page_id(chosen[i]); ++i) {
      context_.store->copy_note(layer, sequence, chosen[i], exponents_.data() + entry * note_bytes);
      add(chosen[i], pages.page(step.pages()[sequence][i]));
      masks_[entry - 1] = batch_.selectable(layer, sequence, chosen[i]);
    }
    for (int64_t group = state.sealed_groups; group < groups; ++group) {
      add(group, batch_.pages(sequence).tail_page(layer, group));
    }
    counts_[sequence] = static_cast<int32_t>(entry - sequence * pages_max);
    if (seen_layer_ == layer) hide_unseen(sequence);
  }
  if (seen_layer_ != layer) return;
  seen_layer_ = -1;
  seen_ = {};
}

void PageTable::describe(PagedAttentionArgs& args) const {
  args.pages = pages_.data();
  args.masks = masks_.data();
  args.positions = positions_.data();
  args.page_counts = counts_.data();
  args.query_positions = query_positions_.data();
  args.exponents = exponents_.empty() ? nullptr : exponents_.data();
  args.pages_max = context_.plan.pages_per_layer;
  args.table_heads = context_.options.heads_apart;
  args.batch = static_cast<int64_t>(counts_.size()) / context_.options.heads_apart;
}

}  // namespace kvswap
