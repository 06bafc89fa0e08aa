#include "methods/clusters/cluster_pages.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "io/status.h"

namespace kvswap {

void ClusterPages::grow(int64_t tokens_max, int64_t clusters_max) {
  // Not by resize() alone: it would take more than was asked.
  places_.reserve(tokens_max);
  places_.resize(tokens_max, kNowhere);
  masks_.reserve(clusters_max * pages_a_cluster_);
  masks_.resize(clusters_max * pages_a_cluster_);
}

int64_t ClusterPages::bytes(int64_t tokens_max, int64_t clusters_max, int64_t pages_a_cluster) {
  return tokens_max * int64_t{sizeof(int32_t)} +
         clusters_max * pages_a_cluster * int64_t{sizeof(uint64_t)};
}

int64_t ClusterPages::pages(int64_t cluster) const {
  int64_t count = 0;
  each_page(cluster, [&](int64_t) { ++count; });
  return count;
}

void ClusterPages::wait(int64_t token) {
  KVSWAP_ASSERT(places_[token] == kNowhere);
  places_[token] = kFirstWaiting - static_cast<int32_t>(waiting_.size());
  waiting_.push_back(token);
}

int64_t ClusterPages::end_wait(int64_t token) {
  const int64_t at = waiting_at(token);
  KVSWAP_ASSERT(at >= 0);
  const auto last = static_cast<int64_t>(waiting_.size()) - 1;
  places_[waiting_[last]] = kFirstWaiting - static_cast<int32_t>(at);
  waiting_[at] = waiting_[last];
  places_[token] = kNowhere;
  waiting_.pop_back();
  return last;
}

std::optional<ClusterPlan> ClusterPages::plan(int64_t cluster, std::span<const int64_t> members,
                                              Pack pack) const {
  const int64_t first = cluster * pages_a_cluster_;
  // Which of the cluster's own slots a token stands in; -1: none.
  const auto own_slot = [&](int64_t token) {
    const int64_t slot = places_[token] >= 0 ? slot_of(token) - first : -1;
    return slot < pages_a_cluster_ ? std::max<int64_t>(slot, -1) : -1;
  };
  std::vector<int64_t> own(pages_a_cluster_);  // members in each of them
  for (const int64_t token : members) {
    if (own_slot(token) >= 0) ++own[own_slot(token)];
  }
  ClusterPlan plan;
  plan.cluster = cluster;
  std::vector<bool> is_full(pages_a_cluster_);
  for (int64_t i = 0; i < pages_a_cluster_; ++i) {
    is_full[i] = pack == Pack::kLoose && own[i] == page_tokens_;
  }
  bool all_at_home = true;
  for (const int64_t token : members) {
    const int64_t slot = own_slot(token);
    if (slot >= 0 && is_full[slot]) continue;
    plan.tokens.push_back(token);
    all_at_home = all_at_home && slot >= 0;
  }
  const auto wanted =
      static_cast<size_t>((std::ssize(plan.tokens) + page_tokens_ - 1) / page_tokens_);
  int64_t in_use = 0;  // pages that are not full
  for (int64_t i = 0; i < pages_a_cluster_; ++i) {
    if (is_full[i]) continue;
    const int64_t held = std::popcount(masks_[first + i]);
    in_use += held > 0 ? 1 : 0;
    // A slot is free once its members have moved, where it holds nobody else.
    if (held == own[i] && plan.slots.size() < wanted) {
      plan.slots.push_back(static_cast<int32_t>(first + i));
    }
  }
  const bool is_packed = members.empty() || (pack == Pack::kLoose && all_at_home &&
                                             static_cast<int64_t>(wanted) == in_use);
  if (is_packed || plan.slots.size() < wanted) return std::nullopt;
  divide_slots(plan);
  return plan;
}

void ClusterPages::divide_slots(ClusterPlan& plan) const {
  const int64_t first = plan.cluster * pages_a_cluster_;
  std::vector<uint64_t> left(masks_.begin() + first, masks_.begin() + first + pages_a_cluster_);
  for (const int64_t token : plan.tokens) {
    const int64_t index = places_[token] < 0 ? -1 : slot_of(token) - first;
    if (index < 0 || index >= pages_a_cluster_) continue;
    left[index] &= ~(uint64_t{1} << places_[token] % page_tokens_);
  }
  each_page(plan.cluster,
            [&](int64_t slot) { (left[slot - first] == 0 ? plan.go : plan.stay).push_back(slot); });
}

int64_t ClusterPages::other_in_slots(int64_t cluster, std::span<const int32_t> clusters) const {
  int64_t found = -1;
  for (size_t token = 0; token < clusters.size(); ++token) {
    if (places_[token] < 0 || slot_of(token) / pages_a_cluster_ != cluster) continue;
    if (clusters[token] != cluster) found = std::max<int64_t>(found, clusters[token]);
  }
  return found;
}

void ClusterPages::leave(int64_t token, std::vector<int32_t>& emptied) {
  const int32_t place = std::exchange(places_[token], kNowhere);
  if (place < 0) return;
  const int64_t slot = place / page_tokens_;
  masks_[slot] &= ~(uint64_t{1} << place % page_tokens_);
  if (masks_[slot] == 0) emptied.push_back(static_cast<int32_t>(slot));
}

std::vector<int32_t> ClusterPages::install(const ClusterPlan& plan) {
  std::vector<int32_t> emptied;
  for (const int64_t token : plan.tokens) {
    KVSWAP_ASSERT(waiting_at(token) < 0);
    leave(token, emptied);
  }
  for (size_t i = 0; i < plan.tokens.size(); ++i) {
    const int32_t slot = plan.slots[i / page_tokens_];
    const auto position = static_cast<int32_t>(i % page_tokens_);
    places_[plan.tokens[i]] = slot * static_cast<int32_t>(page_tokens_) + position;
    masks_[slot] |= uint64_t{1} << position;
  }
  std::erase_if(emptied, [&](int32_t slot) { return masks_[slot] != 0; });
  return emptied;
}

std::vector<int32_t> ClusterPages::truncate(int64_t tokens) {
  std::vector<int32_t> emptied;
  for (auto token = static_cast<int64_t>(places_.size()) - 1; token >= tokens; --token) {
    KVSWAP_ASSERT(waiting_at(token) < 0);
    leave(token, emptied);
  }
  return emptied;
}

}  // namespace kvswap
