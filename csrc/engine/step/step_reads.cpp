#include "engine/step/step_reads.h"

#include <algorithm>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {

size_t StepReads::plan(const Groups& chosen, PageMap::Step step) {
  constexpr int64_t kKeysAtOnce = 128;  // fewer are not worth a thread
  const int64_t sequences = batch_.size();
  std::vector<size_t> first(sequences + 1);  // of all that are chosen
  for (int64_t i = 0; i < sequences; ++i) first[i + 1] = first[i] + chosen[i].size();
  const size_t groups = first.back();
  std::vector<RecordKey> keys(groups);
  std::vector<PageMap::Assignment> assignments(groups);
  const auto of_sequence = [&](auto& all, int64_t sequence) {
    return std::span(all).subspan(first[sequence], chosen[sequence].size());
  };
  const int64_t grain = kKeysAtOnce * sequences / std::max<int64_t>(1, groups) + 1;
  // Sequences have pages of their own, and nothing else changes.
  run_parallel({.parallel = context_.threads()}, sequences, grain, [&](int64_t begin, int64_t end) {
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      const std::span<RecordKey> own = of_sequence(keys, sequence);
      for (size_t i = 0; i < own.size(); ++i) {
        own[i] = context_.store->key(layer_, sequence, chosen[sequence][i]);
      }
      batch_.pages(sequence).map(layer_).plan(own, of_sequence(assignments, sequence), step);
    }
  });
  pages_.resize(sequences);
  fetch_.layer = layer_;
  fetch_.loads.clear();
  fetch_.loads.reserve(groups);
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    take_pages(sequence, chosen[sequence], of_sequence(assignments, sequence));
  }
  return groups;
}

void StepReads::take_pages(int64_t sequence, const std::vector<int32_t>& chosen,
                           std::span<const PageMap::Assignment> assignments) {
  SequencePages& pages = batch_.pages(sequence);
  pages_[sequence].resize(chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int32_t page = assignments[i].page;
    pages_[sequence][i] = page;
    if (assignments[i].is_load) {
      fetch_.loads.push_back(
          {.sequence = sequence, .group = chosen[i], .page = page, .home = pages.page(page)});
    }
  }
  if (context_.plan.replacement != Replacement::kClusters) return;
  // Pages of clusters that stand in the reuse buffer know how large these are.
  for (size_t i = 0; i < chosen.size() && is_page_id(chosen[i]); ++i) {
    const ClusterPages& row = context_.clusters->of(layer_, sequence).pages;
    const int64_t beside = row.pages_beside(slot_of_page(chosen[i]));
    pages.map(layer_).describe(pages_[sequence][i], static_cast<int32_t>(beside));
  }
}

Status StepReads::submit(const SpaceRequest& space) {
  Status submitted = space.free_staging(static_cast<int64_t>(fetch_.loads.size()));
  if (submitted.is_ok()) submitted = sealer_.drain_layer(layer_);
  if (submitted.is_ok()) submitted = context_.space->landing().acquire(fetch_);
  if (submitted.is_ok()) submitted = context_.fetcher->submit(fetch_);
  if (!submitted.is_ok()) forget();
  return submitted;
}

Status StepReads::finish() {
  const double waited = context_.fetcher->counters().wait_seconds;
  Status arrived = context_.fetcher->finish(fetch_);
  waited_seconds_ += context_.fetcher->counters().wait_seconds - waited;
  if (arrived.is_pending()) return arrived;
  if (arrived.is_ok()) arrived = context_.space->landing().publish(fetch_);
  if (!arrived.is_ok()) forget();
  return arrived;
}

void StepReads::forget() {
  for (const Load& load : fetch_.loads) {
    batch_.pages(load.sequence)
        .map(layer_)
        .forget(context_.store->key(layer_, load.sequence, load.group));
  }
  context_.space->landing().give_back(fetch_);
}

std::span<const Load> StepReads::loads() const {
  if (fetch_.layer != layer_) return {};
  return fetch_.loads;
}

}  // namespace kvswap
