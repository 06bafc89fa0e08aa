#include "engine/step/layer_prefetch.h"

#include <algorithm>

#include "io/stopwatch.h"
#include "methods/clusters/cluster_selector.h"

namespace kvswap {

void LayerPrefetch::begin(const SpaceRequest& space, const Groups& last) {
  KVSWAP_ASSERT(!is_reading_);
  const bool is_predicted = !predicted_.empty();
  if (!is_predicted && static_cast<int64_t>(last.size()) != batch_.size()) return;
  if (!space.free_pages().is_ok()) return drop();
  double spent = 0;
  {
    const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kPlan, .layer = layer_},
                          &spent);
    reads_.plan(worth_reading(last), PageMap::Step::kNew);
    is_reading_ = reads_.submit(space).is_ok();
  }
  context_.counters.plan_seconds += spent;
  if (!is_reading_) return drop();
  predicted_ = {};
  has_prefetched_ = is_predicted;
  if (is_predicted) spend(spent);
  uint64_t& counter =
      is_predicted ? context_.counters.groups_prefetched : context_.counters.groups_reloaded;
  counter += reads_.loads().size();
}

/// What was predicted, and of `last` what there are pages for: those that hold some of it keep it,
/// and where other layers had the pages since it is read again.
Groups LayerPrefetch::worth_reading(const Groups& last) const {
  Groups wanted = predicted_;
  wanted.resize(batch_.size());
  if (static_cast<int64_t>(last.size()) != batch_.size()) return wanted;
  const bool is_shared = context_.plan.shares_pages;
  const bool has_left = context_.plan.replacement == Replacement::kNone;
  const RecordTables& tables = context_.store->tables();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    std::vector<int32_t>& groups = wanted[sequence];
    const PageMap& map = batch_.pages(sequence).map(layer_);
    const auto count = static_cast<int64_t>(groups.size());
    for (const int32_t id : last[sequence]) {
      if (std::ssize(groups) >= map.pages()) break;
      // Some of them may have been packed anew since, or dropped.
      const bool is_there = is_page_id(id) ? tables.has_page(layer_, sequence, id)
                                           : id >= tables.first_group(layer_, sequence);
      if (!is_there || std::binary_search(groups.begin(), groups.begin() + count, id)) continue;
      const bool is_in_memory =
          !has_left && map.find(context_.store->key(layer_, sequence, id)) >= 0;
      if (is_shared || is_in_memory) groups.push_back(id);
    }
    std::sort(groups.begin(), groups.end());
  }
  return wanted;
}

Status LayerPrefetch::end() {
  if (!is_reading_) return Status::ok();
  Status arrived = reads_.finish();
  if (arrived.is_pending()) return arrived;
  is_reading_ = false;
  if (!arrived.is_ok()) drop();
  return Status::ok();
}

void LayerPrefetch::drop() {
  predicted_ = {};
  has_prefetched_ = false;
  context_.adaptive_prefetch.count(layer_, {.dropped = 1});
}

void LayerPrefetch::judge(const Groups& chosen) {
  if (!std::exchange(has_prefetched_, false)) return;
  AdaptivePrefetch::Counts counts;
  for (const Load& load : reads_.loads()) {
    const auto group = static_cast<int32_t>(load.group);
    const bool is_hit = !chosen.empty() && std::binary_search(chosen[load.sequence].begin(),
                                                              chosen[load.sequence].end(), group);
    ++(is_hit ? counts.hits : counts.wasted);
  }
  context_.adaptive_prefetch.count(layer_, counts);
}

void LayerPrefetch::report(double waited_seconds) {
  context_.adaptive_prefetch.observe(layer_, has_predicted_, spent_seconds_ + waited_seconds);
  forget();
}

void LayerPrefetch::forget() {
  has_predicted_ = false;
  spent_seconds_ = 0;
  predicted_ = {};
}

}  // namespace kvswap
