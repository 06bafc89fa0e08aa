#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "engine/backend/memory_backend.h"
#include "engine/plan.h"
#include "memory/arena.h"
#include "memory/page_map.h"
#include "memory/page_pool.h"
#include "methods/retention/retained_tokens.h"

namespace kvswap {

/// The memory of one sequence: a pool of records' pages, the reuse buffers of layers, and one
/// of tokens' pages, sinks, tail and retained tokens of each layer, in the model's dtype.
///
/// The tail is a ring: group g of the text stands in the ring's page g modulo its length, from the
/// first group that is not sealed on. Sinks are copies of sealed groups that stay.
class SequencePages {
 public:
  /// The pages are the space's, which outlives them.
  static Result<std::unique_ptr<SequencePages>> create(const Plan& plan, MemoryBackend& space);
  /// What they, and what their layers keep, take of so many.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

  std::byte* page(int32_t index) const { return records_.page(index); }
  const std::shared_ptr<std::byte>& memory() const { return records_.memory(); }
  /// Of the layer, and of all that share its pages.
  PageMap& map(int64_t layer) { return maps_[layer % std::ssize(maps_)]; }
  /// Pages of the reuse buffers, those of Plan::page_layers layers, one after the other; a layer's
  /// begin here.
  int64_t reuse_pages() const { return records_.pages(); }
  std::byte* first_reuse_page(int64_t layer) const {
    return records_.page(static_cast<int32_t>(layer % std::ssize(maps_) * plan_.options.pages_max));
  }
  /// Groups that are pinned as sinks; sink i stands in sink_page(layer, i).
  std::vector<int32_t>& sinks(int64_t layer) { return sinks_[layer]; }
  std::byte* sink_page(int64_t layer, int64_t index) const;
  std::byte* tail_page(int64_t layer, int64_t group) const;
  std::byte* retained_page(int64_t layer, int64_t index) const;
  /// Where layers differ in how many tokens they keep, all layers' pages are one store: the layer
  /// has as many as so many tokens take from now on, its first ones as before. Returns how many.
  int64_t hold_retained(int64_t layer, int64_t tokens);
  /// Of those in e4m3, a part of a page: from the last one on.
  std::byte* retained_float8_page(int64_t layer, int64_t index) const;
  RetainedTokens& retained(int64_t layer) { return retained_[layer]; }
  /// Of tokens that wait for their clusters.
  std::byte* waiting_page(int64_t layer, int64_t index) const {
    return retained_page(layer, plan_.retention.pages + index);
  }

  /// Takes over tail, sinks and retained tokens of another sequence; the reuse buffer begins empty.
  void copy_from(SequencePages& other);
  void clear();

 private:
  SequencePages(const Plan& plan, PagePool records, PagePool tokens, MemoryBackend& space);
  int64_t first_sink(int64_t layer) const;
  void free_retained();

  const Plan& plan_;
  MemoryBackend& space_;
  PagePool records_;
  PagePool tokens_;
  std::vector<PageMap> maps_;                // [page_layers]
  std::vector<std::vector<int32_t>> sinks_;  // [layers][sinks]
  std::vector<RetainedTokens> retained_;     // [layers]
  // Where layers differ in how many tokens they keep: retained pages, numbered through all layers.
  std::vector<std::vector<int32_t>> held_;  // [layers]
  std::vector<int32_t> free_;
};

}  // namespace kvswap
