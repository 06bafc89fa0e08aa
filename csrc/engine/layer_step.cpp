#include "engine/layer_step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "io/stopwatch.h"
#include "methods/cluster_selector.h"

namespace kvswap {
namespace {

/// Groups of `chosen` that hold tokens which are not kept.
uint64_t recalled_of(const KeptTokens& kept, const std::vector<int32_t>& chosen) {
  const std::vector<int32_t>& whole = kept.whole_groups();
  return static_cast<uint64_t>(std::count_if(chosen.begin(), chosen.end(), [&](int32_t group) {
    return !std::binary_search(whole.begin(), whole.end(), group);
  }));
}

}  // namespace

Status LayerStep::ask(const Question& question) {
  KVSWAP_ASSERT(state_ == State::kIdle);
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer_},
                        &parts_.counters.select_seconds);
  const EngineOptions& options = parts_.options;
  made_for_ = batch_.layer(layer_);
  chosen_.resize(batch_.size());
  is_asking_selector_ = parts_.plan.selects && !batch_.all_fit(layer_);
  if (is_asking_selector_) {
    if (!parts_.selector->is_ready(layer_)) {
      return Status::invalid("session: layer " + std::to_string(layer_) + " must choose among " +
                             std::to_string(made_for_.sealed_groups) +
                             " groups and has no projection; call set_projection() first");
    }
    const QueryView& query = question.query;
    const bool is_by_head = parts_.plan.method.score != Score::kSum;
    const bool needs_all_heads = is_by_head || parts_.plan.rows.needs_all_heads;
    if (needs_all_heads && query.heads != options.query_heads) {
      const int64_t apart = options.heads_apart;
      return Status::invalid("look_ahead: query must have all " +
                             std::to_string(apart * options.query_heads) + " heads to score " +
                             (is_by_head ? "by " + options.score : options.rows) + ", got " +
                             std::to_string(apart * query.heads) + "; do not sum them");
    }
    std::vector<Candidates> candidates(batch_.size());
    std::vector<std::vector<int32_t>> attended(batch_.size());  // sinks, and what is kept
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      const std::vector<int32_t>& sinks = batch_.pages(sequence).sinks(layer_);
      const std::vector<int32_t>& kept = batch_.pages(sequence).kept(layer_).whole_groups();
      candidates[sequence] = {&batch_.validity(sequence), sinks};
      if (parts_.keep.shares_groups) {
        candidates[sequence].fewer =
            batch_.pages(sequence).kept(layer_).count() / options.group_tokens;
      }
      if (kept.empty()) continue;
      attended[sequence] = sinks;
      attended[sequence].insert(attended[sequence].end(), kept.begin(), kept.end());
      candidates[sequence].excluded = attended[sequence];
    }
    KVSWAP_RETURN_IF_ERROR(parts_.selector->start_choice(
        {.layer = layer_,
         .query = query,
         .groups = made_for_.sealed_groups,
         .groups_per_query =
             std::min(parts_.group_counts.of(layer_), options.pages_max / query.queries),
         .candidates = candidates,
         .chosen = &chosen_,
         .scale = question.scale}));
  }
  state_ = State::kAsked;
  return Status::ok();
}

Status LayerStep::choose() {
  KVSWAP_ASSERT(state_ == State::kAsked);
  state_ = State::kIdle;
  {
    const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer_},
                          &parts_.counters.select_seconds);
    if (is_asking_selector_) KVSWAP_RETURN_IF_ERROR(parts_.selector->finish_choice());
    // A shorter sequence of the batch gets what it would get alone: everything.
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      if (batch_.fits(layer_, sequence)) {
        batch_.choosable(layer_, sequence, made_for_.sealed_groups, chosen_[sequence]);
      } else if (!is_asking_selector_) {
        chosen_[sequence].clear();  // nothing but what is kept
      }
    }
  }
  apply_override();
  state_ = State::kChosen;
  return Status::ok();
}

Status LayerStep::answer(const Room& make_room) {
  if (state_ == State::kAsked) KVSWAP_RETURN_IF_ERROR(choose());
  Status ready = end_recall();
  if (ready.is_ok()) ready = make_room.of_pages();
  if (!ready.is_ok()) {
    state_ = State::kIdle;
    return ready;
  }
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kPlan, .layer = layer_},
                        &parts_.counters.plan_seconds);
  plan();
  Status submitted = submit(make_room);
  if (!submitted.is_ok()) state_ = State::kIdle;
  return submitted;
}

void LayerStep::recall(const Room& make_room) {
  KVSWAP_ASSERT(state_ == State::kIdle && !is_recalling_);
  if (static_cast<int64_t>(chosen_.size()) != batch_.size()) return;
  if (!make_room.of_pages().is_ok()) return;
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kPlan, .layer = layer_},
                        &parts_.counters.plan_seconds);
  // Some of them may have been packed anew since, or dropped.
  const RecordTables& tables = parts_.store->tables();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    std::erase_if(chosen_[sequence], [&](int32_t id) {
      return is_page_id(id) ? !tables.has_page(layer_, sequence, id)
                            : id < tables.first_group(layer_, sequence);
    });
  }
  plan_loads();
  is_recalling_ = submit(make_room).is_ok();
  if (is_recalling_) parts_.counters.groups_read_again += fetch_.loads.size();
}

Status LayerStep::end_recall() {
  if (!is_recalling_) return Status::ok();
  Status arrived = finish_loads();
  if (arrived.is_pending()) return arrived;
  // What did not arrive is read again, by those who choose it, and its error is theirs.
  is_recalling_ = false;
  return Status::ok();
}

void LayerStep::plan() {
  const size_t groups = plan_loads();
  parts_.counters.groups_attended += groups;
  parts_.counters.groups_loaded += fetch_.loads.size();
  for (int64_t sequence = 0; parts_.keep.pages > 0 && sequence < batch_.size(); ++sequence) {
    if (batch_.fits(layer_, sequence)) continue;  // nothing has been left behind
    parts_.counters.groups_recalled +=
        recalled_of(batch_.pages(sequence).kept(layer_), chosen_[sequence]);
  }
  parts_.counters.sequences += batch_.size() / parts_.options.heads_apart;
  ++parts_.counters.steps;
  state_ = State::kReading;
}

size_t LayerStep::plan_loads() {
  constexpr int64_t kKeysAtOnce = 128;  // fewer are not worth a thread
  const int64_t sequences = batch_.size();
  std::vector<size_t> first(sequences + 1);  // of all that are chosen
  for (int64_t i = 0; i < sequences; ++i) first[i + 1] = first[i] + chosen_[i].size();
  const size_t groups = first.back();
  std::vector<RecordKey> keys(groups);
  std::vector<PageMap::Assignment> assignments(groups);
  const auto of_sequence = [&](auto& all, int64_t sequence) {
    return std::span(all).subspan(first[sequence], chosen_[sequence].size());
  };
  const int64_t grain = kKeysAtOnce * sequences / std::max<int64_t>(1, groups) + 1;
  // Sequences have pages of their own, and nothing else changes.
  run_parallel({.parallel = parts_.threads()}, sequences, grain, [&](int64_t begin, int64_t end) {
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      const std::span<RecordKey> own = of_sequence(keys, sequence);
      for (size_t i = 0; i < own.size(); ++i) {
        own[i] = parts_.store->key(layer_, sequence, chosen_[sequence][i]);
      }
      batch_.pages(sequence).map(layer_).plan(own, of_sequence(assignments, sequence));
    }
  });
  pages_.resize(sequences);
  fetch_.layer = layer_;
  fetch_.loads.clear();
  fetch_.loads.reserve(groups);
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    take_pages(sequence, of_sequence(assignments, sequence));
  }
  return groups;
}

void LayerStep::take_pages(int64_t sequence, std::span<const PageMap::Assignment> assignments) {
  const std::vector<int32_t>& chosen = chosen_[sequence];
  SequencePages& pages = batch_.pages(sequence);
  pages_[sequence].resize(chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int32_t page = assignments[i].page;
    pages_[sequence][i] = page;
    if (assignments[i].is_load) {
      fetch_.loads.push_back({sequence, chosen[i], page, nullptr, pages.page(page)});
    }
  }
  if (parts_.plan.replacement != Replacement::kClusters) return;
  // Pages of clusters that stand in the reuse buffer know how large these are.
  for (size_t i = 0; i < chosen.size() && is_page_id(chosen[i]); ++i) {
    const ClusterPages& row = parts_.clusters->of(layer_, sequence).pages;
    const int64_t beside = row.pages_beside(slot_of_page(chosen[i]));
    pages.map(layer_).describe(pages_[sequence][i], static_cast<int32_t>(beside));
  }
}

Status LayerStep::submit(const Room& make_room) {
  Status submitted = make_room.to_land(static_cast<int64_t>(fetch_.loads.size()));
  if (submitted.is_ok()) submitted = sealer_.settle_layer(layer_);
  if (submitted.is_ok()) submitted = parts_.space->landing().lend(fetch_);
  if (submitted.is_ok()) submitted = parts_.fetcher->submit(fetch_);
  if (!submitted.is_ok()) forget_loads();
  return submitted;
}

Status LayerStep::land() {
  KVSWAP_RETURN_IF_ERROR(end_recall());
  if (state_ != State::kReading) return Status::ok();
  Status arrived = finish_loads();
  if (!arrived.is_pending()) state_ = arrived.is_ok() ? State::kReady : State::kIdle;
  return arrived;
}

/// Where they do not arrive, they are as if nobody had asked for them.
Status LayerStep::finish_loads() {
  Status arrived = parts_.fetcher->finish(fetch_);
  if (arrived.is_pending()) return arrived;
  if (arrived.is_ok()) arrived = parts_.space->landing().publish(fetch_);
  if (!arrived.is_ok()) forget_loads();
  return arrived;
}

Status LayerStep::take() {
  if (state_ == State::kFailed) {
    state_ = State::kIdle;
    return std::exchange(failure_, Status::ok());
  }
  KVSWAP_RETURN_IF_ERROR(land());
  state_ = State::kIdle;
  return Status::ok();
}

Status LayerStep::drop() {
  // Where memory ran out between a question and its reads, nothing is in flight.
  if (state_ == State::kAsked || state_ == State::kChosen) state_ = State::kIdle;
  // What arrives whole may stay; what does not is forgotten by land(), and nobody needed it.
  Status taken = take();
  return state_ == State::kReading || is_recalling_ ? taken : Status::ok();
}

void LayerStep::fail(Status error) {
  if (error.is_ok()) return;
  failure_ = std::move(error);
  state_ = State::kFailed;
}

void LayerStep::forget_loads() {
  for (const Load& load : fetch_.loads) {
    batch_.pages(load.sequence)
        .map(layer_)
        .forget(parts_.store->key(layer_, load.sequence, load.group));
  }
  parts_.space->landing().give_back(fetch_);
}

bool LayerStep::is_for(int64_t queries) const {
  const Batch::Layer& now = batch_.layer(layer_);
  return is_read() && made_for_.sealed_groups == now.sealed_groups &&
         made_for_.positions + queries == now.positions;
}

Status LayerStep::override_with(std::vector<std::vector<int32_t>> groups) {
  if (static_cast<int64_t>(groups.size()) != batch_.size()) {
    return Status::invalid("override_selection: groups must be given for each of " +
                           std::to_string(batch_.size()) + " sequences, got " +
                           std::to_string(groups.size()));
  }
  const int64_t pages_max = parts_.options.pages_max;
  for (std::vector<int32_t>& of_sequence : groups) {
    std::sort(of_sequence.begin(), of_sequence.end());
    of_sequence.erase(std::unique(of_sequence.begin(), of_sequence.end()), of_sequence.end());
    if (static_cast<int64_t>(of_sequence.size()) > pages_max) {
      return Status::invalid("override_selection: a sequence must have at most pages_max (" +
                             std::to_string(pages_max) + ") groups, got " +
                             std::to_string(of_sequence.size()));
    }
  }
  overriding_ = std::move(groups);
  return Status::ok();
}

void LayerStep::apply_override() {
  if (static_cast<int64_t>(overriding_.size()) != batch_.size()) return;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    std::vector<int32_t>& chosen = chosen_[sequence];
    chosen.clear();
    for (const int32_t group : overriding_[sequence]) {
      const bool is_there = group >= parts_.store->tables().first_group(layer_, sequence) &&
                            group < made_for_.sealed_groups;
      if (is_there && !batch_.is_pinned(layer_, sequence, group)) chosen.push_back(group);
    }
  }
  overriding_.clear();
}

void LayerStep::forget_choice() {
  chosen_.clear();
  overriding_.clear();
}

}  // namespace kvswap
