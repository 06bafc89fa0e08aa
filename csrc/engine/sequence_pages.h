#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine_options.h"
#include "engine/page_space.h"
#include "memory/page_map.h"
#include "memory/page_pool.h"

namespace kvswap {

/// The memory of one sequence: one pool, the reuse buffers of all layers first, then sinks and tail
/// of each.
///
/// The tail is a ring: group g of the text stands in the ring's page g modulo its length, from the
/// first group that is not sealed on. Sinks are copies of sealed groups that stay.
class SequencePages {
 public:
  /// The pages are the space's, which outlives them.
  static Result<std::unique_ptr<SequencePages>> create(const EngineOptions& options,
                                                       int64_t record_bytes, PageSpace& space);

  const PagePool& pool() const { return pool_; }
  PageMap& map(int64_t layer) { return maps_[layer]; }
  /// Pages of the reuse buffers, all layers', one after the other; those of a layer begin here.
  int64_t reuse_pages() const { return options_.layers * options_.pages_max; }
  std::byte* first_reuse_page(int64_t layer) const {
    return pool_.page(static_cast<int32_t>(layer * options_.pages_max));
  }
  /// Groups that are pinned as sinks; sink i stands in sink_page(layer, i).
  std::vector<int32_t>& sinks(int64_t layer) { return sinks_[layer]; }
  int32_t sink_page(int64_t layer, int64_t index) const;
  int32_t tail_page(int64_t layer, int64_t group) const;

  /// Takes over tail and sinks of another sequence; the reuse buffer begins empty.
  void copy_from(SequencePages& other, int64_t record_bytes);
  void clear();

 private:
  SequencePages(const EngineOptions& options, PagePool pool, PageSpace& space);
  int64_t first_sink(int64_t layer) const;

  EngineOptions options_;
  PageSpace& space_;
  PagePool pool_;
  std::vector<PageMap> maps_;                // [layers]
  std::vector<std::vector<int32_t>> sinks_;  // [layers][sinks]
};

}  // namespace kvswap
