#include "methods/clusters/cluster_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>

namespace kvswap {
namespace {

ClusterFault fault(const char* tensor, const char* must) { return {tensor, must}; }

std::optional<ClusterFault> fault_of_clusters(const ClusterNumbers& numbers,
                                              const ClusterLimits& limits) {
  const auto count = std::ssize(numbers.variances);
  std::vector<int64_t> size(count);
  for (const int32_t cluster : numbers.clusters) {
    if (cluster != kInSinks && cluster != kIsPending && (cluster < 0 || cluster >= count)) {
      return fault("clusters", "name clusters that are there");
    }
    if (cluster >= 0 && ++size[cluster] > limits.options.cluster_tokens_max) {
      return fault("clusters", "give a cluster max_tokens tokens at most");
    }
  }
  for (int64_t cluster = 0; cluster < count; ++cluster) {
    if (numbers.comparable[cluster] < 0 || numbers.comparable[cluster] > size[cluster]) {
      return fault("cluster_comparable", "count some of each cluster's tokens");
    }
    if (!std::isfinite(numbers.variances[cluster]) || numbers.variances[cluster] < 0) {
      return fault("cluster_variances", "be finite and not negative");
    }
  }
  if (!std::ranges::all_of(numbers.centroids, [](float one) { return std::isfinite(one); })) {
    return fault("centroids", "be finite");
  }
  if (numbers.threshold && !(std::isfinite(*numbers.threshold) && *numbers.threshold >= 0)) {
    return fault("cluster_thresholds", "be finite, or negative for none");
  }
  if (numbers.settled_at > limits.tokens) {
    return fault("cluster_settled", "count tokens that are there");
  }
  return std::nullopt;
}

std::optional<ClusterFault> fault_of_pending(const ClusterNumbers& numbers,
                                             const ClusterLimits& limits) {
  // A crop may have given back the number that a token waits for.
  const int64_t clusters = limits.options.clusters_max(limits.room);
  const bool is_local = limits.options.update == ClusterUpdate::kLocal;
  std::set<int32_t> tokens;
  for (const auto& [cluster, token] : numbers.pending) {
    const bool is_known =
        is_local ? cluster == PendingTokens::kNoCluster : cluster >= 0 && cluster < clusters;
    const bool is_token = token >= 0 && token < limits.tokens;
    if (!is_known || !is_token || numbers.clusters[token] != kIsPending ||
        !tokens.insert(token).second) {
      return fault("cluster_pending", "name each token that waits, and the cluster it waits for");
    }
  }
  if (std::ssize(tokens) != std::ranges::count(numbers.clusters, kIsPending)) {
    return fault("cluster_pending", "name each token that waits, once");
  }
  return std::nullopt;
}

/// Of clusters that stand in others' pages some are packed first: those in whose pages no other
/// stands. A split moves tokens to newer clusters alone, which is why there are some.
bool stand_in_a_circle(const std::map<int32_t, std::set<int64_t>>& pages, int64_t pages_a_cluster) {
  std::map<int64_t, std::set<int64_t>> hosts;  // of a cluster, others in whose pages it stands
  std::map<int64_t, int64_t> guests;           // of a cluster, others that stand in its pages
  for (const auto& [cluster, slots] : pages) {
    for (const int64_t slot : slots) {
      const int64_t host = slot / pages_a_cluster;
      if (host == cluster || !hosts[cluster].insert(host).second) continue;
      ++guests[host];
    }
  }
  std::vector<int64_t> alone;
  for (const auto& [cluster, its] : hosts) {
    if (!guests.contains(cluster)) alone.push_back(cluster);
  }
  size_t gone = 0;
  for (; !alone.empty(); ++gone) {
    const int64_t cluster = alone.back();
    alone.pop_back();
    for (const int64_t host : hosts[cluster]) {
      if (--guests[host] == 0 && hosts.contains(host)) alone.push_back(host);
    }
  }
  return gone < hosts.size();
}

/// Tokens of pages, and those that wait.
std::optional<ClusterFault> fault_of_places(const ClusterNumbers& numbers,
                                            const ClusterLimits& limits) {
  const int64_t slots =
      limits.options.clusters_max(limits.room) * limits.pages_a_cluster * limits.page_tokens;
  std::set<int32_t> waiting;
  std::vector<bool> is_taken(slots);
  const auto count = std::ssize(numbers.variances);
  std::map<int32_t, std::set<int64_t>> pages;  // that each cluster's tokens stand in
  for (int64_t token = 0; token < limits.tokens; ++token) {
    const int32_t place = numbers.places[token];
    const int32_t cluster = numbers.clusters[token];
    if (place < ClusterPages::kNowhere) {
      waiting.insert(place);
      if (cluster == kInSinks) return fault("clusters", "let no token outside of them wait");
      continue;
    }
    if ((place == ClusterPages::kNowhere) != (cluster == kInSinks)) {
      return fault("clusters", "give each token in a cluster one place");
    }
    if (place == ClusterPages::kNowhere) continue;
    if (cluster < 0 || place >= slots || is_taken[place]) {
      return fault("clusters", "give each token in a cluster a place of its own");
    }
    is_taken[place] = true;
    const int64_t page = place / limits.page_tokens;
    if (page / limits.pages_a_cluster >= count) {
      return fault("clusters", "let each token stand in a page of a cluster that is there");
    }
    pages[cluster].insert(page);
  }
  if (stand_in_a_circle(pages, limits.pages_a_cluster)) {
    return fault("clusters", "let no clusters stand in each other's pages in a circle");
  }
  const int64_t most = 2 * limits.pages_a_cluster;
  if (std::ranges::any_of(pages, [&](const auto& of) { return std::ssize(of.second) > most; })) {
    return fault("clusters", "let a cluster stand in the pages of two at most");
  }
  const int64_t waits = std::ranges::count_if(
      numbers.places, [](int32_t place) { return place < ClusterPages::kNowhere; });
  if (waits > limits.options.waiting_max() || waits != std::ssize(waiting) ||
      (waits > 0 && *waiting.begin() != ClusterPages::kFirstWaiting - waits + 1)) {
    return fault("clusters", "let tokens wait in the places for it, one after the other");
  }
  return std::nullopt;
}

}  // namespace

std::optional<ClusterFault> fault_of(const ClusterNumbers& numbers, const ClusterLimits& limits) {
  if (auto found = fault_of_clusters(numbers, limits)) return found;
  if (auto found = fault_of_pending(numbers, limits)) return found;
  return fault_of_places(numbers, limits);
}

void ClusterNumbers::restore(ClusterRow& row) const {
  restore(row.clusters.table_);
  row.clusters.threshold_ = {threshold, settled_at};
  for (const auto& [cluster, token] : pending) row.clusters.waiting_.add(cluster, token);
  row.clusters.left_ = std::ssize(clusters);
  row.pages.restore(places);
  // Files of before numbers were given again may count fewer than tokens wait for.
  auto count = std::ssize(variances);
  for (const auto& [cluster, token] : pending) count = std::max<int64_t>(count, cluster + 1);
  row.clusters.table_.numbers_.set(count, [](int64_t) { return true; });
  row.free_numbers();
}

void ClusterNumbers::restore(ClusterTable& table) const {
  std::ranges::copy(clusters, table.place_.begin());
  std::ranges::copy(variances, table.variance_.begin());
  std::ranges::copy(comparable, table.counted_.begin());
  for (const int32_t cluster : clusters) {
    if (cluster >= 0) ++table.size_[cluster];
  }
  for (int64_t cluster = 0; cluster < std::ssize(variances); ++cluster) {
    const auto first = centroids.begin() + cluster * table.width_;
    table.centroids_.set(cluster, std::vector<double>(first, first + table.width_));
  }
}

void ClusterPages::restore(const std::vector<int32_t>& places) {
  std::ranges::copy(places, places_.begin());
  waiting_.resize(std::ranges::count_if(places, [](int32_t one) { return one < kNowhere; }));
  for (int64_t token = 0; token < std::ssize(places); ++token) {
    const int32_t place = places[token];
    if (place < kNowhere) waiting_[kFirstWaiting - place] = token;
    if (place >= 0) masks_[place / page_tokens_] |= uint64_t{1} << place % page_tokens_;
  }
}

}  // namespace kvswap
