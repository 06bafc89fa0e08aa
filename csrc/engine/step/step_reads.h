#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"

namespace kvswap {

/// Of each sequence, groups in rising order; pages of clusters by their page_id().
using Groups = std::vector<std::vector<int32_t>>;  // [batch][groups]

/// Frees resources of other layers before this layer submits its reads.
struct SpaceRequest {
  /// Waits until no reads of other layers are in flight to the pages that they share.
  std::function<Status()> free_pages;
  /// Completes reads of other layers that hold the staging buffers which `loads` reads need.
  std::function<Status(int64_t loads)> free_staging;
};

/// The reads of one layer's step: which page each group gets, and what is on the way there.
///
///   plan -> submit -> finish; then it is planned anew.
///
/// What does not arrive is as if it had never been asked for. Not thread-safe.
class StepReads {
 public:
  /// fetch: of the layer's pages, so of all layers that share them; no other layer's when this one
  /// begins to read.
  StepReads(int64_t layer, EngineContext& context, const Batch& batch, Sealer& sealer, Fetch& fetch)
      : layer_(layer), context_(context), batch_(batch), sealer_(sealer), fetch_(fetch) {}

  /// A page for each group; returns how many groups these are.
  size_t plan(const Groups& groups, PageMap::Step step);
  Status submit(const SpaceRequest& space);
  Status finish();

  /// Of the newest plan, unless another layer has read since; else none.
  std::span<const Load> loads() const;
  const std::vector<std::vector<int32_t>>& pages() const { return pages_; }  // [batch][groups]
  /// Seconds that the caller has waited for them since it was asked last.
  double take_waited_seconds() { return std::exchange(waited_seconds_, 0); }

 private:
  void take_pages(int64_t sequence, const std::vector<int32_t>& groups,
                  std::span<const PageMap::Assignment> assignments);
  void forget();

  int64_t layer_;
  EngineContext& context_;
  const Batch& batch_;
  Sealer& sealer_;
  Fetch& fetch_;
  double waited_seconds_ = 0;
  std::vector<std::vector<int32_t>> pages_;  // [batch][groups]: of the sequence's pool
};

}  // namespace kvswap
