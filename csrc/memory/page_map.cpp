#include "memory/page_map.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "io/status.h"

namespace kvswap {
namespace {

constexpr uint64_t kProtectedSteps = 16;

}  // namespace

std::optional<Replacement> parse_replacement(const std::string& name) {
  if (name == "fifo") return Replacement::kFifo;
  if (name == "lru") return Replacement::kLru;
  if (name == "unused") return Replacement::kUnused;
  if (name == "none") return Replacement::kNone;
  if (name == "score") return Replacement::kScore;
  if (name == "clusters") return Replacement::kClusters;
  return std::nullopt;
}

PageMap::PageMap(int32_t first_page, int32_t pages, Replacement replacement)
    : first_page_(first_page),
      replacement_(replacement),
      states_(pages),
      clusters_(replacement == Replacement::kClusters ? pages : 0),
      buckets_(std::bit_ceil(static_cast<uint32_t>(2 * std::max(pages, 1))), -1) {
  order_.reserve(pages);
}

int32_t PageMap::bucket_of(uint64_t key) const {
  const auto mask = static_cast<uint32_t>(buckets_.size() - 1);
  auto bucket = static_cast<uint32_t>((key * 0x9E3779B97F4A7C15u) >> 32) & mask;
  while (buckets_[bucket] >= 0 && states_[buckets_[bucket]].key != key) {
    bucket = (bucket + 1) & mask;
  }
  return static_cast<int32_t>(bucket);
}

int32_t PageMap::find(uint64_t key) const {
  const int32_t index = buckets_[bucket_of(key)];
  return index < 0 ? -1 : first_page_ + index;
}

void PageMap::insert(uint64_t key, int32_t index) {
  buckets_[bucket_of(key)] = index;
  states_[index].key = key;
  states_[index].is_filled = true;
}

void PageMap::erase(int32_t index) {
  const auto mask = static_cast<uint32_t>(buckets_.size() - 1);
  auto hole = static_cast<uint32_t>(bucket_of(states_[index].key));
  states_[index] = {};
  if (!clusters_.empty()) clusters_[index] = {};
  buckets_[hole] = -1;
  // Those behind the hole that probed across it are put in again, else they could not be found.
  for (uint32_t next = (hole + 1) & mask; buckets_[next] >= 0; next = (next + 1) & mask) {
    const int32_t moved = buckets_[next];
    buckets_[next] = -1;
    buckets_[bucket_of(states_[moved].key)] = moved;
  }
}

void PageMap::plan(std::span<const uint64_t> keys, std::span<Assignment> assignments, Step step) {
  KVSWAP_ASSERT(keys.size() <= states_.size() && keys.size() == assignments.size());
  if (replacement_ == Replacement::kNone && step == Step::kNew) clear();
  ++step_;
  size_t loads = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const int32_t index = buckets_[bucket_of(keys[i])];
    assignments[i] = {index < 0 ? -1 : first_page_ + index, index < 0};
    if (index >= 0) {
      states_[index].used_step = step_;
    } else {
      ++loads;
    }
  }
  if (loads == 0) return;

  if (replacement_ == Replacement::kFifo) return replace_oldest(keys, assignments, loads);
  order_.clear();
  for (int32_t index = 0; index < pages(); ++index) {
    if (!states_[index].is_filled || states_[index].used_step != step_) order_.push_back(index);
  }
  KVSWAP_ASSERT(order_.size() >= loads);
  const uint64_t last = clusters_.empty() ? 0 : stays_from();
  const auto rank = [&](int32_t index) {
    return clusters_.empty() ? leaving_rank(replacement_, states_[index])
                             : cluster_rank(states_[index], clusters_[index], last);
  };
  const auto leaves_before = [&](int32_t a, int32_t b) {
    const uint64_t rank_a = rank(a);
    const uint64_t rank_b = rank(b);
    return rank_a != rank_b ? rank_a < rank_b : a < b;
  };
  std::nth_element(order_.begin(), order_.begin() + loads - 1, order_.end(), leaves_before);
  std::sort(order_.begin(), order_.begin() + loads, leaves_before);
  auto leaving = order_.begin();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (assignments[i].is_load) assignments[i].page = replace(*leaving++, keys[i]);
  }
}

/// Its unit leaves; the page has `key` now.
int32_t PageMap::replace(int32_t index, uint64_t key) {
  if (states_[index].is_filled) erase(index);
  insert(key, index);
  states_[index].loaded_step = states_[index].used_step = step_;
  return first_page_ + index;
}

/// The pages stand in the order in which they leave: those of this step go behind all others, in
/// page order, so that no step looks at more of them than at those who leave and those it passes
/// over.
void PageMap::replace_oldest(std::span<const uint64_t> keys, std::span<Assignment> assignments,
                             size_t loads) {
  if (!is_ordered_) put_in_order();
  auto next = order_.begin();
  auto stays = order_.begin();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!assignments[i].is_load) continue;
    while (states_[*next].is_filled && states_[*next].used_step == step_) *stays++ = *next++;
    assignments[i].page = replace(*next++, keys[i]);
  }
  stays = std::copy(next, order_.end(), stays);
  KVSWAP_ASSERT(static_cast<size_t>(order_.end() - stays) == loads);
  auto newest = stays;
  for (const Assignment& assigned : assignments) {
    if (assigned.is_load) *newest++ = assigned.page - first_page_;
  }
  std::sort(stays, order_.end());
}

/// Empty pages first, then the oldest load; ties in page order.
void PageMap::put_in_order() {
  order_.resize(states_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return leaving_rank(replacement_, states_[a]) < leaving_rank(replacement_, states_[b]);
  });
  is_ordered_ = true;
}

void PageMap::forget(uint64_t key) {
  const int32_t index = buckets_[bucket_of(key)];
  if (index < 0) return;
  erase(index);
  is_ordered_ = false;
}

int32_t PageMap::rename(uint64_t key, uint64_t new_key) {
  const int32_t index = buckets_[bucket_of(key)];
  if (index < 0) return -1;
  const PageState state = states_[index];
  const ClusterState cluster = clusters_.empty() ? ClusterState{} : clusters_[index];
  erase(index);
  states_[index] = state;
  if (!clusters_.empty()) clusters_[index] = {cluster.pages, std::max<uint64_t>(1, step_)};
  insert(new_key, index);
  return first_page_ + index;
}

void PageMap::rate(int32_t page, float score) {
  KVSWAP_ASSERT(page >= first_page_ && page - first_page_ < pages() && score >= 0);
  states_[page - first_page_].score = score;
}

void PageMap::describe(int32_t page, int32_t cluster_pages) {
  KVSWAP_ASSERT(page >= first_page_ && page - first_page_ < pages() && cluster_pages > 0);
  clusters_[page - first_page_].pages = cluster_pages;
}

uint64_t PageMap::stays_from() const {
  const uint64_t oldest = step_ > kProtectedSteps ? step_ - kProtectedSteps : 1;
  // How many were updated in each of those steps.
  std::array<int32_t, kProtectedSteps + 1> updated{};
  for (const ClusterState& cluster : clusters_) {
    if (cluster.updated_step >= oldest) ++updated[cluster.updated_step - oldest];
  }
  int32_t left = pages() / 4;
  uint64_t from = oldest + kProtectedSteps + 1;
  while (from > oldest && updated[from - 1 - oldest] <= left) left -= updated[--from - oldest];
  return from;
}

std::vector<PageMap::Held> PageMap::held() const {
  std::vector<Held> held;
  for (int32_t index = 0; index < pages(); ++index) {
    if (!states_[index].is_filled) continue;
    const ClusterState cluster = clusters_.empty() ? ClusterState{} : clusters_[index];
    held.push_back({first_page_ + index, states_[index], cluster});
  }
  return held;
}

void PageMap::restore(uint64_t step, std::span<const Held> held) {
  clear();
  step_ = step;
  for (const Held& one : held) {
    const int32_t index = one.page - first_page_;
    states_[index] = one.state;
    if (!clusters_.empty()) clusters_[index] = one.cluster;
    insert(one.state.key, index);
  }
}

void PageMap::clear() {
  std::fill(states_.begin(), states_.end(), PageState{});
  std::fill(clusters_.begin(), clusters_.end(), ClusterState{});
  std::fill(buckets_.begin(), buckets_.end(), -1);
  step_ = 0;
  is_ordered_ = false;
}

}  // namespace kvswap
