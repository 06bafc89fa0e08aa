#include "engine/layer_steps.h"

#include <utility>

namespace kvswap {

void LayerSteps::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  // Of a group that a layer has chosen: its number and its page.
  constexpr int64_t kChosenBytes = 2 * sizeof(int32_t);
  const int64_t pages = size_product({extent.batch, plan.options.pages_max});
  arena.take(Use::kTables, size_product({plan.page_layers, pages, Fetch::bytes_per_load()}));
  arena.take(Use::kTables, size_product({plan.options.layers, pages, kChosenBytes}));
}

LayerSteps::LayerSteps(EngineParts& parts, const Batch& batch, Sealer& sealer)
    : parts_(parts), batch_(batch), fetches_(parts.plan.page_layers) {
  for (int64_t layer = 0; layer < parts.options.layers; ++layer) {
    Fetch& fetch = fetches_[layer % parts.plan.page_layers];
    steps_.emplace_back(layer, parts, batch, sealer, fetch);
  }
}

Status LayerSteps::look_ahead(int64_t layer, const Question& question) {
  LayerStep& step = steps_[layer];
  KVSWAP_RETURN_IF_ERROR(step.ask(
      question, verifies(layer) ? LayerStep::Purpose::kPrefetch : LayerStep::Purpose::kChoice));
  if (step.state() == LayerStep::State::kIdle) return Status::ok();
  if (step.is_choosing()) {
    asked_ = layer;
    return Status::ok();
  }
  if (!is_yet_to_choose(layer - 1)) return answer(layer);
  if (step.is_predicting()) {
    if (!step.finish_prediction()) return Status::ok();
  } else {
    KVSWAP_RETURN_IF_ERROR(step.choose());
  }
  asked_ = layer;
  return Status::ok();
}

bool LayerSteps::verifies(int64_t layer) const {
  // Where all fits any query chooses the same.
  return parts_.look_ahead == LookAheadMode::kVerify && !batch_.all_fit(layer);
}

/// In the step that the layer behind it looks ahead for.
bool LayerSteps::is_yet_to_choose(int64_t layer) const {
  if (layer < 0 || parts_.plan.is_exact(layer)) return false;
  return batch_.layer(layer).positions == batch_.layer(layer + 1).positions &&
         !steps_[layer].is_for(0);
}

Status LayerSteps::take(int64_t layer, const Question& question) {
  LayerStep& step = steps_[layer];
  if (step.state() != LayerStep::State::kFailed && !step.is_for(question.query.queries)) {
    if (step.state() != LayerStep::State::kIdle) KVSWAP_RETURN_IF_ERROR(step.drop());
    KVSWAP_RETURN_IF_ERROR(step.ask(question));
    KVSWAP_RETURN_IF_ERROR(answer(layer));
  }
  settle();
  KVSWAP_RETURN_IF_ERROR(step.take());
  if (verifies(layer)) step.report();
  recall(layer + 1, layer);
  return Status::ok();
}

/// Where pages are shared: a layer that did not look ahead for this step reads what it attended in
/// the last one while the layer before it attends. Those two stand in pages apart.
void LayerSteps::recall(int64_t layer, int64_t before) {
  const EngineOptions& options = parts_.options;
  if (!parts_.plan.shares_pages || layer == options.layers) return;
  LayerStep& step = steps_[layer];
  const bool is_behind = batch_.layer(layer).positions < batch_.layer(before).positions;
  if (step.state() != LayerStep::State::kIdle || step.has_pages() || !is_behind) return;
  if (!batch_.is_restored(layer)) step.recall(room_for(layer));
}

void LayerSteps::settle() {
  if (asked_ >= 0) steps_[asked_].fail(answer(asked_));
}

void LayerSteps::settle_before(int64_t layer) {
  if (asked_ == layer + 1 && steps_[asked_].is_predicting()) {
    // The selector is free for this layer's own query, whose reads go first.
    if (steps_[asked_].finish_prediction()) return;
    asked_ = -1;
  }
  const bool waits = asked_ == layer + 1 && steps_[asked_].state() == LayerStep::State::kChosen;
  if (!waits) settle();
}

Status LayerSteps::answer(int64_t layer) {
  if (layer == asked_) asked_ = -1;
  return steps_[layer].answer(room_for(layer));
}

Room LayerSteps::room_for(int64_t layer) {
  return {.of_pages = [this, layer] { return make_page_room(layer); },
          .to_land = [this, layer](int64_t loads) { return make_landing_room(layer, loads); }};
}

/// Ends the steps of layers that share this one's pages: what they read is no longer there.
Status LayerSteps::make_page_room(int64_t layer) {
  const int64_t apart = parts_.plan.page_layers;
  for (int64_t other = layer % apart; other < parts_.options.layers; other += apart) {
    if (other != layer && steps_[other].has_pages()) KVSWAP_RETURN_IF_ERROR(steps_[other].drop());
  }
  return Status::ok();
}

/// Lands other layers' loads until this one's have a place; their errors are theirs to report.
Status LayerSteps::make_landing_room(int64_t layer, int64_t loads) {
  for (int64_t other = 0; !parts_.space->landing().can_lend(loads); ++other) {
    if (other == parts_.options.layers) break;
    if (other == layer) continue;
    Status landed = steps_[other].land();
    if (landed.is_pending()) return landed;
    steps_[other].fail(std::move(landed));
  }
  return Status::ok();
}

Status LayerSteps::drop_all() {
  for (LayerStep& step : steps_) KVSWAP_RETURN_IF_ERROR(step.drop());
  return Status::ok();
}

Status LayerSteps::drop_in_pages_of(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(make_page_room(layer));
  return steps_[layer].drop();
}

void LayerSteps::forget_choices() {
  for (LayerStep& step : steps_) step.forget_choice();
}

}  // namespace kvswap
