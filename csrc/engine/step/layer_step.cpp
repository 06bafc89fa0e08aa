#include "engine/step/layer_step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "io/stopwatch.h"

namespace kvswap {
namespace {

/// Groups of `chosen` that hold tokens which are not kept.
uint64_t reloaded_of(const RetainedTokens& retained, const std::vector<int32_t>& chosen) {
  const std::vector<int32_t>& whole = retained.whole_groups();
  return static_cast<uint64_t>(std::count_if(chosen.begin(), chosen.end(), [&](int32_t group) {
    return !std::binary_search(whole.begin(), whole.end(), group);
  }));
}

}  // namespace

Status LayerStep::select(const AttentionQuery& question, Purpose purpose) {
  KVSWAP_ASSERT(state_ == State::kIdle);
  is_prediction_ = purpose == Purpose::kPrefetch;
  double seconds = 0;
  Status asked;
  {
    const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer_},
                          &seconds);
    asked = start_selection(question);
  }
  count_selecting(question.since_ns == 0
                      ? seconds
                      : 1e-9 * static_cast<double>(Timeline::now_ns() - question.since_ns),
                  seconds);
  if (is_prediction_) prefetch_.expect();
  if (!asked.is_ok()) return is_prediction_ ? drop_prediction(std::move(asked)) : asked;
  state_ = State::kSelecting;
  return asked;
}

/// spent: with what came before it, for a prediction.
void LayerStep::count_selecting(double spent, double seconds) {
  context_.counters.select_seconds += seconds;
  if (is_prediction_) prefetch_.spend(spent);
}

Status LayerStep::start_selection(const AttentionQuery& question) {
  const EngineOptions& options = context_.options;
  made_for_ = batch_.layer(layer_);
  Groups& chosen = is_prediction_ ? prefetch_.predicted() : chosen_;
  chosen.resize(batch_.size());
  is_asking_selector_ = context_.plan.selects && !batch_.all_fit(layer_);
  if (is_asking_selector_) {
    if (!context_.selector->is_ready(layer_)) {
      return Status::invalid("session: layer " + std::to_string(layer_) + " must choose among " +
                             std::to_string(made_for_.sealed_groups) +
                             " groups and has no projection; call set_projection() first");
    }
    const QueryView& query = question.query;
    const bool is_by_head = context_.plan.method.score != Score::kSum;
    const bool needs_all_heads = is_by_head || context_.plan.rows.needs_all_heads;
    if (needs_all_heads && query.heads != options.query_heads) {
      const int64_t apart = options.heads_apart;
      return Status::invalid("look_ahead: query must have all " +
                             std::to_string(apart * options.query_heads) + " heads to score " +
                             (is_by_head ? "by " + options.score : options.rows) + ", got " +
                             std::to_string(apart * query.heads) + "; do not sum them");
    }
    std::vector<Candidates> candidates(batch_.size());
    const bool has_last = std::ssize(last_) == batch_.size();
    std::vector<std::vector<int32_t>> attended(batch_.size());  // sinks, and what is kept
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      const std::vector<int32_t>& sinks = batch_.pages(sequence).sinks(layer_);
      const std::vector<int32_t>& retained = batch_.pages(sequence).retained(layer_).whole_groups();
      candidates[sequence] = {&batch_.validity(sequence), sinks};
      if (has_last) candidates[sequence].last = last_[sequence];
      if (context_.retention.shares_groups) {
        candidates[sequence].fewer =
            batch_.pages(sequence).retained(layer_).count() / options.group_tokens;
      }
      if (retained.empty()) continue;
      attended[sequence] = sinks;
      attended[sequence].insert(attended[sequence].end(), retained.begin(), retained.end());
      candidates[sequence].excluded = attended[sequence];
    }
    KVSWAP_RETURN_IF_ERROR(context_.selector->start_choice(
        {.layer = layer_,
         .query = query,
         .groups = made_for_.sealed_groups,
         .groups_per_query =
             std::min(context_.group_counts.of(layer_), options.pages_max / query.queries),
         .candidates = candidates,
         .chosen = &chosen,
         .scale = question.scale,
         .effort = is_prediction_ ? Effort::kCoarse : Effort::kWhole}));
  }
  return Status::ok();
}

Status LayerStep::finish_selection() {
  KVSWAP_ASSERT(state_ == State::kSelecting);
  state_ = State::kIdle;
  Groups& chosen = is_prediction_ ? prefetch_.predicted() : chosen_;
  double seconds = 0;
  Status answered;
  {
    const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer_},
                          &seconds);
    if (is_asking_selector_) answered = context_.selector->finish_choice();
    // A shorter sequence of the batch gets what it would get alone: everything.
    for (int64_t sequence = 0; answered.is_ok() && sequence < batch_.size(); ++sequence) {
      if (batch_.fits(layer_, sequence)) {
        batch_.choosable(layer_, sequence, made_for_.sealed_groups, chosen[sequence]);
      } else if (!is_asking_selector_) {
        chosen[sequence].clear();  // nothing but what is kept
      }
    }
  }
  count_selecting(seconds, seconds);
  KVSWAP_RETURN_IF_ERROR(answered);
  is_prediction_ ? override_.apply_to_prediction(chosen) : override_.apply(chosen);
  state_ = State::kSelected;
  return Status::ok();
}

Status LayerStep::drop_prediction(Status error) {
  is_prediction_ = false;
  if (error.code() == StatusCode::kInvalid) {
    prefetch_.forget();
    return error;
  }
  prefetch_.drop();
  return Status::ok();
}

bool LayerStep::finish_prediction() {
  if (state_ != State::kSelecting) return state_ == State::kSelected;
  Status chosen = finish_selection();
  if (!chosen.is_ok()) (void)drop_prediction(std::move(chosen)).is_ok();
  return state_ == State::kSelected;
}

Status LayerStep::submit_reads(const SpaceRequest& space) {
  if (is_predicting()) {
    if (!finish_prediction()) return Status::ok();
    state_ = State::kIdle;
    is_prediction_ = false;
    prefetch_.begin(space, chosen_);
    return Status::ok();
  }
  if (state_ == State::kSelecting) KVSWAP_RETURN_IF_ERROR(finish_selection());
  Status ready = prefetch_.end();
  if (ready.is_ok()) ready = space.free_pages();
  if (!ready.is_ok()) {
    state_ = State::kIdle;
    return ready;
  }
  const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kPlan, .layer = layer_},
                        &context_.counters.plan_seconds);
  plan();
  Status submitted = reads_.submit(space);
  if (!submitted.is_ok()) state_ = State::kIdle;
  return submitted;
}

void LayerStep::plan() {
  const PageMap::Step step = prefetch_.step();
  prefetch_.judge(chosen_);
  context_.counters.groups_attended += reads_.plan(chosen_, step);
  context_.counters.groups_loaded += reads_.loads().size();
  for (int64_t sequence = 0; context_.retention.pages > 0 && sequence < batch_.size(); ++sequence) {
    if (batch_.fits(layer_, sequence)) continue;  // nothing has been left behind
    context_.counters.groups_recalled +=
        reloaded_of(batch_.pages(sequence).retained(layer_), chosen_[sequence]);
  }
  context_.counters.sequences += batch_.size() / context_.options.heads_apart;
  ++context_.counters.steps;
  state_ = State::kReading;
}

Status LayerStep::complete() {
  KVSWAP_RETURN_IF_ERROR(prefetch_.end());
  if (state_ != State::kReading) return Status::ok();
  Status arrived = reads_.finish();
  if (!arrived.is_pending()) state_ = arrived.is_ok() ? State::kReady : State::kIdle;
  return arrived;
}

Status LayerStep::take() {
  KVSWAP_RETURN_IF_ERROR(end());
  if (context_.options.new_group_ratio) last_ = chosen_;
  return Status::ok();
}

Status LayerStep::end() {
  if (state_ == State::kFailed) {
    state_ = State::kIdle;
    return std::exchange(failure_, Status::ok());
  }
  KVSWAP_RETURN_IF_ERROR(complete());
  state_ = State::kIdle;
  return Status::ok();
}

Status LayerStep::drop() {
  // Where memory ran out between a question and its reads, nothing is in flight.
  if (state_ == State::kSelecting || state_ == State::kSelected) state_ = State::kIdle;
  // What arrives whole may stay; what does not is forgotten by land(), and nobody needed it.
  Status taken = end();
  if (has_pages()) return taken;
  prefetch_.judge({});
  prefetch_.forget();
  (void)reads_.take_waited_seconds();
  return Status::ok();
}

void LayerStep::fail(Status error) {
  if (error.is_ok()) return;
  failure_ = std::move(error);
  state_ = State::kFailed;
}

bool LayerStep::is_for(int64_t queries) const {
  const Batch::Layer& now = batch_.layer(layer_);
  return is_read() && made_for_.sealed_groups == now.sealed_groups &&
         made_for_.positions + queries == now.positions;
}

void LayerStep::forget_selection() {
  chosen_.clear();
  last_.clear();
  prefetch_.forget();
  override_.clear();
}

}  // namespace kvswap
