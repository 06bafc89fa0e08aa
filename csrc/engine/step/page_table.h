#pragma once

#include <cstdint>
#include <vector>

#include "engine/sequence/batch.h"
#include "engine/step/layer_step.h"
#include "kernels/paged_attention.h"

namespace kvswap {

/// For one step of one layer: the pages that attention reads. Reused, so that a steady state
/// allocates nothing.
class PageTable {
 public:
  PageTable(const EngineContext& context, const Batch& batch) : context_(context), batch_(batch) {}

  /// Sinks, retained tokens, those that wait for their cluster, the step's groups or clusters, and
  /// the tail. Of tokens in pages that are no group's, which every query sees, page i stands as if
  /// at position -(i + 1) * group_tokens; of retained ones those in e4m3 behind the others.
  /// queries: the newest positions.
  void build(int64_t layer, int64_t queries, const LayerStep& step);
  /// The layer's next table shows these positions alone, rising: [sequences][...]. As large as the
  /// caller's own list, and gone with that table.
  void see_only(int64_t layer, std::vector<std::vector<int32_t>> positions);
  /// The table's part of the kernel's arguments.
  void describe(PagedAttentionArgs& args) const;

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  /// First entries of a sequence's pages that are no group's.
  struct Apart {
    int64_t retained = 0;
    int64_t float8 = 0;
    int64_t waiting = 0;
    int64_t chosen = 0;
  };
  void hide_later_padding(const Apart& first, const PaddingMask& validity,
                          const RetainedTokens& retained);
  void hide_later_padding(const Apart& first, const PaddingMask& validity, const ClusterRow& row,
                          const std::vector<int32_t>& chosen);

  void hide_unseen(int64_t sequence);

  const EngineContext& context_;
  const Batch& batch_;
  int64_t seen_layer_ = -1;                 // -1: all is seen
  std::vector<std::vector<int32_t>> seen_;  // [sequences][positions], rising
  // Of sequences, which are KV heads where those are apart.
  std::vector<const void*> pages_;        // [batch, pages_max]
  std::vector<uint64_t> masks_;           // [batch, pages_max]
  std::vector<int32_t> positions_;        // [batch, pages_max]
  std::vector<int32_t> counts_;           // [batch]
  std::vector<int32_t> query_positions_;  // [batch]
  std::vector<int8_t> exponents_;         // [batch, pages_max, note_bytes]
};

}  // namespace kvswap
