#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/step/layer_step.h"

namespace kvswap {

/// The steps of all layers, and what they share: one selector, and places for loads to land.
///
/// A layer that looks ahead while the one before it has yet to choose, with its own query, reads
/// behind that one, which waits for the disk next. drain() comes before anything else happens to
/// the session: it submits such reads, and completes the choice that look_ahead() has left to a
/// device. With look_ahead=verify every layer has yet to choose, so that what a layer lacks is read
/// before the next one's prefetch. Not thread-safe.
class StepCoordinator {
 public:
  StepCoordinator(EngineContext& context, const Batch& batch, Sealer& sealer);

  /// Begins a layer's step ahead of its attention, or prefetches for it; on a device the choice may
  /// go on beside the caller, and errors then are reported when the step is taken.
  Status look_ahead(int64_t layer, const AttentionQuery& question);
  /// The pages that the newest `query.queries` positions attend: the step that looked ahead, or one
  /// that is made now.
  Status take(int64_t layer, const AttentionQuery& question);
  void drain();
  /// The same before a call of this layer's own step, behind whose reads others may wait.
  void drain_before(int64_t layer);
  Status drop(int64_t layer) { return steps_[layer].drop(); }
  Status drop_all();
  /// Those whose groups stand in the layer's pages, its own included: the pages are wanted.
  Status drop_in_pages_of(int64_t layer);
  void forget_choices();
  LayerStep& of(int64_t layer) { return steps_[layer]; }

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  bool is_yet_to_select(int64_t layer) const;
  /// Does the layer choose by its own query, whatever was predicted?
  bool verifies(int64_t layer) const;
  Status submit_reads(int64_t layer);
  void reload_last_selection(int64_t layer, int64_t before);
  SpaceRequest space_request(int64_t layer);
  Status make_page_room(int64_t layer);
  Status make_landing_room(int64_t layer, int64_t loads);

  EngineContext& context_;
  const Batch& batch_;
  std::vector<Fetch> fetches_;   // [page_layers()]
  std::deque<LayerStep> steps_;  // [layers]
  int64_t asked_ = -1;           // the layer that is asked, or has chosen; -1: none
};

}  // namespace kvswap
