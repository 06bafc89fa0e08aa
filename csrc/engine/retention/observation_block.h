#pragma once

#include <cstdint>
#include <vector>

#include "engine/prefill/prefix_reader.h"
#include "engine/retention/token_eviction.h"
#include "engine/sequence/batch.h"
#include "kernels/paged_attention.h"
#include "methods/retention/observation_window.h"

namespace kvswap {

/// A block of one sequence's past as queries of a window attend it: the page table of a batch of
/// one. Keeps its tables from block to block; not thread-safe.
class ObservationBlock {
 public:
  explicit ObservationBlock(const Plan& plan) : plan_(plan) {}

  /// Where the pages of the next block are to be listed, before take().
  PrefixPages& listed() { return listed_; }
  /// The block is these groups, whose pages are listed.
  void take(const PrefixReader::Groups& groups, const Batch& batch);
  /// The block is these pages of what is left of dropped tokens, which all queries see.
  void take(const SurvivingTokens& left, int64_t first_page, int64_t pages);

  int64_t tokens() const { return page_count_ * plan_.options.group_tokens; }
  /// Is token `token` of the block there, and does it count?
  bool counts(int64_t token) const {
    return (masks_[token / plan_.options.group_tokens] >> (token % plan_.options.group_tokens) &
            1) != 0;
  }
  /// Queries of a window over the block, as many from `first` on as stand in a row and attend at
  /// once; the output is left to fill in. Stands until the next call. log_sums: of these queries.
  PagedAttentionArgs asked(const ObservationWindow& window, int64_t first, float* log_sums);

 private:
  const Plan& plan_;
  PrefixPages listed_;
  std::vector<const void*> pages_;
  std::vector<uint64_t> masks_;
  std::vector<int32_t> positions_;
  int32_t page_count_ = 0;
  int32_t query_position_ = 0;
};

}  // namespace kvswap
