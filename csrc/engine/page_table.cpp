#include "engine/page_table.h"

#include <algorithm>

#include "methods/cluster_selector.h"

namespace kvswap {

void PageTable::build(const Of& of, const Batch& batch, const Tail& tail, const LayerStep& step,
                      const RecordStore& store) {
  const auto [layer, pages_max, queries, heads_apart, note_bytes, clusters] = of;
  const Batch::Layer& state = batch.layer(layer);
  const int64_t group_tokens = tail.group_tokens();
  const int64_t groups = (state.positions + group_tokens - 1) / group_tokens;
  pages_max_ = pages_max;
  heads_apart_ = heads_apart;
  pages_.resize(batch.size() * pages_max);
  masks_.resize(batch.size() * pages_max);
  positions_.resize(batch.size() * pages_max);
  exponents_.assign(batch.size() * pages_max * note_bytes, kNotFloat8);
  counts_.assign(batch.size(), 0);
  query_positions_.assign(batch.size(), static_cast<int32_t>(state.positions - queries));
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    SequencePages& pages = batch.pages(sequence);
    int64_t entry = sequence * pages_max;
    const auto add = [&](int64_t group, const std::byte* page) {
      pages_[entry] = page;
      masks_[entry] = batch.mask(layer, sequence, group);
      positions_[entry] = static_cast<int32_t>(group * group_tokens);
      ++entry;
    };
    // Sinks hold the first valid tokens, so no chosen group comes before them.
    const std::vector<int32_t>& sinks = pages.sinks(layer);
    for (size_t i = 0; i < sinks.size(); ++i) {
      add(sinks[i], pages.sink_page(layer, static_cast<int64_t>(i)));
    }
    const KeptTokens& kept = pages.kept(layer);
    int64_t before = 0;  // slots of pages that are no group's
    const auto add_apart = [&](const std::byte* page, uint64_t mask) {
      before += group_tokens;
      pages_[entry] = page;
      masks_[entry] = mask;
      positions_[entry] = static_cast<int32_t>(-before);
      ++entry;
    };
    const auto add_kept = [&](const std::byte* page, int64_t tokens) {
      add_apart(page, ~uint64_t{0} >> (64 - std::min(group_tokens, tokens)));
    };
    const auto in_dtype = static_cast<int64_t>(kept.positions().size());
    for (int64_t done = 0; done < in_dtype; done += group_tokens) {
      add_kept(pages.kept_page(layer, done / group_tokens), in_dtype - done);
    }
    const auto in_float8 = static_cast<int64_t>(kept.float8().size());
    for (int64_t done = 0; done < in_float8; done += group_tokens) {
      const int64_t page = done / group_tokens;
      std::copy_n(kept.exponents().begin() + page * note_bytes, note_bytes,
                  exponents_.begin() + entry * note_bytes);
      add_kept(pages.kept_float8_page(layer, page), in_float8 - done);
    }
    const std::vector<int32_t>& chosen = step.chosen()[sequence];
    const bool chose_clusters = clusters != nullptr && !batch.fits(layer, sequence) &&
                                (chosen.empty() || is_page_id(chosen.front()));
    if (chose_clusters) {
      const ClusterPages& of_row = clusters->of(layer, sequence).pages;
      const int64_t waiting = std::ssize(of_row.waiting());
      for (int64_t done = 0; done < waiting; done += group_tokens) {
        add_kept(pages.waiting_page(layer, done / group_tokens), waiting - done);
      }
      for (size_t i = 0; i < chosen.size(); ++i) {
        add_apart(pages.page(step.pages()[sequence][i]), of_row.mask(slot_of_page(chosen[i])));
      }
    }
    for (size_t i = 0; i < chosen.size() && !is_page_id(chosen[i]); ++i) {
      store.copy_note(layer, sequence, chosen[i], exponents_.data() + entry * note_bytes);
      add(chosen[i], pages.page(step.pages()[sequence][i]));
      masks_[entry - 1] = batch.selectable(layer, sequence, chosen[i]);
    }
    for (int64_t group = state.sealed_groups; group < groups; ++group) {
      add(group, tail.page(layer, sequence, group));
    }
    counts_[sequence] = static_cast<int32_t>(entry - sequence * pages_max);
  }
}

void PageTable::describe(PagedAttentionArgs& args) const {
  args.pages = pages_.data();
  args.masks = masks_.data();
  args.positions = positions_.data();
  args.page_counts = counts_.data();
  args.query_positions = query_positions_.data();
  args.exponents = exponents_.empty() ? nullptr : exponents_.data();
  args.pages_max = pages_max_;
  args.table_heads = heads_apart_;
  args.batch = static_cast<int64_t>(counts_.size()) / heads_apart_;
}

}  // namespace kvswap
