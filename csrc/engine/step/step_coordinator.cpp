#include "engine/step/step_coordinator.h"

#include <utility>

namespace kvswap {

void StepCoordinator::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  // Of a group that a layer has chosen: its number and its page; its number as of the last step.
  const int64_t chosen_bytes = (plan.options.new_group_ratio ? 3 : 2) * sizeof(int32_t);
  const int64_t pages = size_product({extent.batch, plan.options.pages_max});
  arena.take(Use::kTables, size_product({plan.page_layers, pages, Fetch::bytes_per_load()}));
  arena.take(Use::kTables, size_product({plan.options.layers, pages, chosen_bytes}));
}

StepCoordinator::StepCoordinator(EngineContext& context, const Batch& batch, Sealer& sealer)
    : context_(context), batch_(batch), fetches_(context.plan.page_layers) {
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    Fetch& fetch = fetches_[layer % context.plan.page_layers];
    steps_.emplace_back(layer, context, batch, sealer, fetch);
  }
}

Status StepCoordinator::look_ahead(int64_t layer, const AttentionQuery& question) {
  LayerStep& step = steps_[layer];
  KVSWAP_RETURN_IF_ERROR(step.select(
      question, verifies(layer) ? LayerStep::Purpose::kPrefetch : LayerStep::Purpose::kSelection));
  if (step.state() == LayerStep::State::kIdle) return Status::ok();
  if (step.is_choosing()) {
    asked_ = layer;
    return Status::ok();
  }
  if (!is_yet_to_select(layer - 1)) return submit_reads(layer);
  if (step.is_predicting()) {
    if (!step.finish_prediction()) return Status::ok();
  } else {
    KVSWAP_RETURN_IF_ERROR(step.finish_selection());
  }
  asked_ = layer;
  return Status::ok();
}

bool StepCoordinator::verifies(int64_t layer) const {
  // Where all fits any query chooses the same.
  return context_.look_ahead == LookAheadMode::kVerify && !batch_.all_fit(layer);
}

/// In the step that the layer behind it looks ahead for.
bool StepCoordinator::is_yet_to_select(int64_t layer) const {
  if (layer < 0 || context_.plan.is_exact(layer)) return false;
  return batch_.layer(layer).positions == batch_.layer(layer + 1).positions &&
         !steps_[layer].is_for(0);
}

Status StepCoordinator::take(int64_t layer, const AttentionQuery& question) {
  LayerStep& step = steps_[layer];
  if (step.state() != LayerStep::State::kFailed && !step.is_for(question.query.queries)) {
    if (step.state() != LayerStep::State::kIdle) KVSWAP_RETURN_IF_ERROR(step.drop());
    KVSWAP_RETURN_IF_ERROR(step.select(question));
    KVSWAP_RETURN_IF_ERROR(submit_reads(layer));
  }
  drain();
  KVSWAP_RETURN_IF_ERROR(step.take());
  if (verifies(layer)) step.report();
  reload_last_selection(layer + 1, layer);
  return Status::ok();
}

/// Where pages are shared: a layer that did not look ahead for this step reads what it attended in
/// the last one while the layer before it attends. Those two stand in pages apart.
void StepCoordinator::reload_last_selection(int64_t layer, int64_t before) {
  const EngineOptions& options = context_.options;
  if (!context_.plan.shares_pages || layer == options.layers) return;
  LayerStep& step = steps_[layer];
  const bool needs_catch_up = batch_.layer(layer).positions < batch_.layer(before).positions;
  if (step.state() != LayerStep::State::kIdle || step.has_pages() || !needs_catch_up) return;
  if (!batch_.is_restored(layer)) step.reload_last_selection(space_request(layer));
}

void StepCoordinator::drain() {
  if (asked_ >= 0) steps_[asked_].fail(submit_reads(asked_));
}

void StepCoordinator::drain_before(int64_t layer) {
  if (asked_ == layer + 1 && steps_[asked_].is_predicting()) {
    // The selector is free for this layer's own query, whose reads go first.
    if (steps_[asked_].finish_prediction()) return;
    asked_ = -1;
  }
  const bool waits = asked_ == layer + 1 && steps_[asked_].state() == LayerStep::State::kSelected;
  if (!waits) drain();
}

Status StepCoordinator::submit_reads(int64_t layer) {
  if (layer == asked_) asked_ = -1;
  return steps_[layer].submit_reads(space_request(layer));
}

SpaceRequest StepCoordinator::space_request(int64_t layer) {
  return {.free_pages = [this, layer] { return make_page_room(layer); },
          .free_staging = [this, layer](int64_t loads) { return make_landing_room(layer, loads); }};
}

/// Ends the steps of layers that share this one's pages: what they read is no longer there.
Status StepCoordinator::make_page_room(int64_t layer) {
  const int64_t apart = context_.plan.page_layers;
  for (int64_t other = layer % apart; other < context_.options.layers; other += apart) {
    if (other != layer && steps_[other].has_pages()) KVSWAP_RETURN_IF_ERROR(steps_[other].drop());
  }
  return Status::ok();
}

/// Lands other layers' loads until this one's have a place; their errors are theirs to report.
Status StepCoordinator::make_landing_room(int64_t layer, int64_t loads) {
  for (int64_t other = 0; !context_.space->landing().can_acquire(loads); ++other) {
    if (other == context_.options.layers) break;
    if (other == layer) continue;
    Status landed = steps_[other].complete();
    if (landed.is_pending()) return landed;
    steps_[other].fail(std::move(landed));
  }
  return Status::ok();
}

Status StepCoordinator::drop_all() {
  for (LayerStep& step : steps_) KVSWAP_RETURN_IF_ERROR(step.drop());
  return Status::ok();
}

Status StepCoordinator::drop_in_pages_of(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(make_page_room(layer));
  return steps_[layer].drop();
}

void StepCoordinator::forget_choices() {
  for (LayerStep& step : steps_) step.forget_selection();
}

}  // namespace kvswap
