#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/layer_step.h"
#include "engine/tail.h"
#include "kernels/paged_attention.h"
#include "methods/cluster_rows.h"

namespace kvswap {

/// For one step of one layer: the pages that attention reads. Reused, so that a steady state
/// allocates nothing.
class PageTable {
 public:
  struct Of {
    int64_t layer = 0;
    int64_t pages_max = 0;  // of a sequence
    int64_t queries = 0;    // the newest positions
    int64_t heads_apart = 1;
    int64_t note_bytes = 0;                 // of a record; 0: all pages are of the model's dtype
    const ClusterRows* clusters = nullptr;  // where the layer chooses them
  };
  /// Sinks, kept tokens, those that wait for their cluster, the step's groups or clusters, and the
  /// tail. Of tokens in pages that are no group's, which every query sees, page i stands as if at
  /// position -(i + 1) * group_tokens; of kept ones those in e4m3 behind the others.
  void build(const Of& of, const Batch& batch, const Tail& tail, const LayerStep& step,
             const RecordStore& store);
  /// The table's part of the kernel's arguments.
  void describe(PagedAttentionArgs& args) const;

 private:
  /// First entries of a sequence's pages that are no group's.
  struct Apart {
    int64_t kept = 0;
    int64_t float8 = 0;
    int64_t waiting = 0;
    int64_t chosen = 0;
  };
  void hide_later_padding(const Apart& first, const TokenValidity& validity,
                          const KeptTokens& kept);
  void hide_later_padding(const Apart& first, const TokenValidity& validity, const ClusterRow& row,
                          const std::vector<int32_t>& chosen);

  int64_t pages_max_ = 0;
  int64_t group_tokens_ = 0;
  int64_t heads_apart_ = 1;
  // Of sequences, which are KV heads where those are apart.
  std::vector<const void*> pages_;        // [batch, pages_max]
  std::vector<uint64_t> masks_;           // [batch, pages_max]
  std::vector<int32_t> positions_;        // [batch, pages_max]
  std::vector<int32_t> counts_;           // [batch]
  std::vector<int32_t> query_positions_;  // [batch]
  std::vector<int8_t> exponents_;         // [batch, pages_max, note_bytes]
};

}  // namespace kvswap
