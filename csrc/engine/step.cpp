#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/page_table.h"
#include "io/stopwatch.h"

namespace kvswap {

int64_t Engine::choosable_groups(int64_t layer, int64_t sequence) const {
  const int64_t sealed = layers_[layer].sealed_groups;
  const int64_t padding =
      std::min(sealed, validity_[sequence].first_valid() / options_.group_tokens);
  const auto sinks = static_cast<int64_t>(sequences_[sequence]->sinks(layer).size());
  return sealed - padding - sinks;
}

bool Engine::fits(int64_t layer, int64_t sequence) const {
  return choosable_groups(layer, sequence) <= options_.groups_max;
}

bool Engine::all_fit(int64_t layer) const {
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    if (!fits(layer, sequence)) return false;
  }
  return true;
}

bool Engine::needs_projection(int64_t layer) const {
  return !selector_->has_projection(layer) && !all_fit(layer);
}

Status Engine::look_ahead(int64_t layer, const QueryView& query) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  settle_choice();
  drop_step(layer);
  if (layers_[layer].sealed_groups == 0 || query.queries < 1 ||
      query.queries > options_.select_queries_max || needs_projection(layer)) {
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(start_choice(layer, query));
  if (!is_asked_ || space_->is_host()) return handed_back(finish_choice());
  return handed_back(Status::ok());
}

/// Asks the selector, where there is a choice; finish_choice() does the rest.
Status Engine::start_choice(int64_t layer, const QueryView& query) {
  const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kSelect, .layer = layer},
                        &counters_.select_seconds);
  Step& step = layers_[layer].step;
  step.failure = Status::ok();
  step.columns = layers_[layer].columns;
  step.sealed_groups = layers_[layer].sealed_groups;
  step.chosen.resize(batch());
  is_asked_ = !all_fit(layer);
  if (!is_asked_) {
    choosing_ = layer;
    return Status::ok();
  }
  if (!selector_->has_projection(layer)) {
    return Status::invalid("session: layer " + std::to_string(layer) + " must choose among " +
                           std::to_string(step.sealed_groups) +
                           " groups and has no projection; call set_projection() first");
  }
  std::vector<Candidates> candidates(batch());
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    candidates[sequence] = {&validity_[sequence], sequences_[sequence]->sinks(layer)};
  }
  selector_->start_choice(
      {.layer = layer,
       .query = query,
       .groups = step.sealed_groups,
       .groups_per_query = std::min(options_.groups_max, options_.pages_max / query.queries),
       .candidates = candidates,
       .chosen = &step.chosen});
  choosing_ = layer;
  return Status::ok();
}

/// The choice under way becomes a plan, and its reads are submitted.
Status Engine::finish_choice() {
  const int64_t layer = std::exchange(choosing_, -1);
  {
    const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kSelect, .layer = layer},
                          &counters_.select_seconds);
    if (is_asked_) KVSWAP_RETURN_IF_ERROR(selector_->finish_choice());
    // A shorter sequence of the batch gets what it would get alone: everything.
    for (int64_t sequence = 0; sequence < batch(); ++sequence) {
      if (fits(layer, sequence)) choose_all(layer, sequence);
    }
  }
  apply_override(layer);
  return submit(layer);
}

/// What look_ahead() left under way on a device. Before anything else happens to the session.
void Engine::settle_choice() {
  if (choosing_ < 0) return;
  Step& step = layers_[choosing_].step;
  step.failure = finish_choice();
}

bool Engine::is_pinned(int64_t layer, int64_t sequence, int64_t group) const {
  const std::vector<int32_t>& sinks = sequences_[sequence]->sinks(layer);
  return std::find(sinks.begin(), sinks.end(), group) != sinks.end();
}

void Engine::choose_all(int64_t layer, int64_t sequence) {
  Step& step = layers_[layer].step;
  std::vector<int32_t>& chosen = step.chosen[sequence];
  chosen.clear();
  const int64_t first = validity_[sequence].first_valid() / options_.group_tokens;
  for (int64_t group = first; group < step.sealed_groups; ++group) {
    if (!is_pinned(layer, sequence, group) && mask(layer, sequence, group) != 0) {
      chosen.push_back(static_cast<int32_t>(group));
    }
  }
}

Status Engine::override_selection(int64_t layer, std::vector<std::vector<int32_t>> groups) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  settle_choice();
  if (static_cast<int64_t>(groups.size()) != batch()) {
    return Status::invalid("override_selection: groups must be given for each of " +
                           std::to_string(batch()) + " sequences, got " +
                           std::to_string(groups.size()));
  }
  for (std::vector<int32_t>& of_sequence : groups) {
    std::sort(of_sequence.begin(), of_sequence.end());
    of_sequence.erase(std::unique(of_sequence.begin(), of_sequence.end()), of_sequence.end());
    if (static_cast<int64_t>(of_sequence.size()) > options_.pages_max) {
      return Status::invalid("override_selection: a sequence must have at most pages_max (" +
                             std::to_string(options_.pages_max) + ") groups, got " +
                             std::to_string(of_sequence.size()));
    }
  }
  layers_[layer].step.overriding = std::move(groups);
  return Status::ok();
}

void Engine::apply_override(int64_t layer) {
  Step& step = layers_[layer].step;
  if (static_cast<int64_t>(step.overriding.size()) != batch()) return;
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    std::vector<int32_t>& chosen = step.chosen[sequence];
    chosen.clear();
    for (const int32_t group : step.overriding[sequence]) {
      const bool is_sealed = group >= 0 && group < step.sealed_groups;
      if (is_sealed && !is_pinned(layer, sequence, group)) chosen.push_back(group);
    }
  }
  step.overriding.clear();
}

Status Engine::submit(int64_t layer) {
  const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kPlan, .layer = layer},
                        &counters_.plan_seconds);
  Step& step = layers_[layer].step;
  step.pages.resize(batch());
  step.fetch.layer = layer;
  step.fetch.loads.clear();
  size_t groups = 0;
  for (const std::vector<int32_t>& chosen : step.chosen) groups += chosen.size();
  step.fetch.loads.reserve(groups);
  std::vector<RecordKey> keys;
  std::vector<PageMap::Assignment> assignments;
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    const std::vector<int32_t>& chosen = step.chosen[sequence];
    SequencePages& pages = *sequences_[sequence];
    keys.clear();
    for (const int32_t group : chosen) keys.push_back(store_->key(layer, sequence, group));
    assignments.resize(keys.size());
    pages.map(layer).plan(keys, assignments);
    step.pages[sequence].resize(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      const int32_t page = assignments[i].page;
      step.pages[sequence][i] = page;
      if (assignments[i].is_load) {
        step.fetch.loads.push_back({sequence, chosen[i], page, nullptr, pages.pool().page(page)});
      }
    }
    counters_.groups_attended += keys.size();
  }
  counters_.groups_loaded += step.fetch.loads.size();
  counters_.sequences += batch();
  ++counters_.steps;
  step.is_planned = true;
  step.has_landed = false;
  make_landing_room(layer);
  Status submitted = settle_seals_of(layer);
  if (submitted.is_ok()) submitted = space_->lend(step.fetch);
  if (submitted.is_ok()) submitted = fetcher_->submit(step.fetch);
  if (!submitted.is_ok()) forget_loads(layer);
  return submitted;
}

/// Lands other layers' loads until this one's have a place; what fails is theirs to tell.
void Engine::make_landing_room(int64_t layer) {
  const auto loads = static_cast<int64_t>(layers_[layer].step.fetch.loads.size());
  for (int64_t other = 0; other < options_.layers && !space_->can_lend(loads); ++other) {
    Step& step = layers_[other].step;
    if (other == layer || !step.is_planned || step.has_landed) continue;
    step.failure = land(other);
  }
}

Status Engine::land(int64_t layer) {
  Step& step = layers_[layer].step;
  if (step.has_landed) return Status::ok();
  Status arrived = fetcher_->finish(step.fetch);
  if (arrived.is_ok()) arrived = space_->publish(step.fetch);
  if (!arrived.is_ok()) {
    forget_loads(layer);
    return arrived;
  }
  step.has_landed = true;
  return Status::ok();
}

Status Engine::finish(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(land(layer));
  layers_[layer].step.is_planned = false;
  return Status::ok();
}

void Engine::forget_loads(int64_t layer) {
  Step& step = layers_[layer].step;
  for (const Load& load : step.fetch.loads) {
    sequences_[load.sequence]->map(layer).forget(store_->key(layer, load.sequence, load.group));
  }
  space_->give_back(step.fetch);
  step.is_planned = false;
}

void Engine::drop_step(int64_t layer) {
  Step& step = layers_[layer].step;
  step.failure = Status::ok();
  if (!step.is_planned) return;
  // What arrives whole may stay; what does not is forgotten by finish(), and nobody needed it.
  (void)finish(layer).is_ok();
}

void Engine::drop_steps() {
  for (int64_t layer = 0; layer < options_.layers; ++layer) drop_step(layer);
}

Status Engine::attend(const AttendArgs& args) {
  KVSWAP_RETURN_IF_ERROR(check_layer(args.layer));
  settle_choice();
  Layer& layer = layers_[args.layer];
  const int64_t queries = args.query.queries;
  if (queries < 1 || queries > options_.select_queries_max || queries > layer.columns) {
    return Status::invalid("attend: queries must be at least 1 and at most select_queries_max (" +
                           std::to_string(options_.select_queries_max) +
                           ") and the columns appended (" + std::to_string(layer.columns) +
                           "), got " + std::to_string(queries));
  }
  Step& step = layer.step;
  if (!step.failure.is_ok()) return std::exchange(step.failure, Status::ok());
  const bool fits = step.is_planned && step.sealed_groups == layer.sealed_groups &&
                    step.columns + queries == layer.columns;
  if (!fits) {
    drop_step(args.layer);
    KVSWAP_RETURN_IF_ERROR(start_choice(args.layer, args.query));
    KVSWAP_RETURN_IF_ERROR(finish_choice());
  }
  KVSWAP_RETURN_IF_ERROR(finish(args.layer));
  {
    const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kAttend, .layer = args.layer},
                          &counters_.attend_seconds);
    build_page_table(args.layer, *table_);
    run_attention(args, *table_);
  }
  return handed_back(seal_overflow(args.layer));
}

/// The caller's tensors are its own again.
Status Engine::handed_back(Status status) {
  const Status handed = space_->hand_back();
  return status.is_ok() ? handed : status;
}

void Engine::build_page_table(int64_t layer, PageTable& table) {
  const Layer& state = layers_[layer];
  const int64_t group_tokens = options_.group_tokens;
  const int64_t groups = (state.columns + group_tokens - 1) / group_tokens;
  table.resize(batch(), options_.pages_per_layer());
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    SequencePages& pages = *sequences_[sequence];
    int64_t entry = sequence * table.pages_max;
    const auto add = [&](int64_t group, int32_t page) {
      table.pages[entry] = pages.pool().page(page);
      table.masks[entry] = mask(layer, sequence, group);
      table.columns[entry] = static_cast<int32_t>(group * group_tokens);
      ++entry;
    };
    // Sinks hold the first valid tokens, so no chosen group comes before them.
    const std::vector<int32_t>& sinks = pages.sinks(layer);
    for (size_t i = 0; i < sinks.size(); ++i) {
      add(sinks[i], pages.sink_page(layer, static_cast<int64_t>(i)));
    }
    const std::vector<int32_t>& chosen = state.step.chosen[sequence];
    for (size_t i = 0; i < chosen.size(); ++i) add(chosen[i], state.step.pages[sequence][i]);
    for (int64_t group = state.sealed_groups; group < groups; ++group) {
      add(group, pages.tail_page(layer, group));
    }
    table.counts[sequence] = static_cast<int32_t>(entry - sequence * table.pages_max);
  }
}

void Engine::run_attention(const AttendArgs& args, const PageTable& table) {
  PagedAttentionArgs kernel;
  kernel.query = args.query.data;
  kernel.query_batch_stride = args.query.batch_stride;
  kernel.query_head_stride = args.query.head_stride;
  kernel.query_token_stride = args.query.query_stride;
  kernel.output = args.output;
  kernel.pages = table.pages.data();
  kernel.masks = table.masks.data();
  kernel.columns = table.columns.data();
  kernel.page_counts = table.counts.data();
  const std::vector<int32_t> query_columns(
      batch(), static_cast<int32_t>(layers_[args.layer].columns - args.query.queries));
  kernel.query_columns = query_columns.data();
  kernel.pages_max = table.pages_max;
  kernel.batch = batch();
  kernel.heads = options_.heads;
  kernel.queries = args.query.queries;
  kernel.scale = args.scale;
  kernel.shape = options_.record_shape();
  kernel.dtype = options_.dtype;
  space_->attend(args.layer, kernel);
}

}  // namespace kvswap
