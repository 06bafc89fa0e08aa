#include "methods/clusters/cluster_store.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace kvswap {
namespace {

constexpr int64_t kGrowTokens = 1024;  // at a time

int64_t width_of(const MethodOptions& options) { return options.kv_heads * options.head_dim; }

}  // namespace

std::vector<ClusterRow::WaitedFor> ClusterRow::waited_for() const {
  std::map<int64_t, int64_t> tokens;
  for (const int64_t token : pages.waiting()) {
    const int32_t cluster = clusters.table().place()[token];
    const int64_t waits_for = cluster >= 0 ? cluster : clusters.waiting().waits_for(token);
    if (waits_for != PendingTokens::kNoCluster) ++tokens[waits_for];
  }
  std::vector<WaitedFor> found;
  for (const auto& [cluster, count] : tokens) found.push_back({cluster, count});
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.tokens > b.tokens; });
  return found;
}

std::vector<int32_t> ClusterRow::truncate(int64_t tokens) {
  std::vector<int32_t> emptied = pages.truncate(tokens);
  clusters.truncate(tokens, [this](int64_t cluster) { return pages.pages(cluster) > 0; });
  return emptied;
}

void ClusterRow::free_numbers() {
  clusters.truncate(clusters.left(), [this](int64_t cluster) { return pages.pages(cluster) > 0; });
}

int64_t pages_a_cluster(const MethodOptions& options) {
  return (options.clusters.cluster_tokens_max + options.group_tokens - 1) / options.group_tokens;
}

ClusterStore::ClusterStore(const MethodOptions& options)
    : options_(options), rows_(options.layers), room_(options.layers) {}

void ClusterStore::set_sequences(int64_t sequences) {
  sequences_ = sequences;
  const std::vector<int64_t>& exact = options_.exact_layers;
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    rows_[layer].clear();
    rows_[layer].shrink_to_fit();
    room_[layer] = 0;
    if (std::find(exact.begin(), exact.end(), layer) != exact.end()) continue;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      rows_[layer].push_back({AdaptiveClusters(width_of(options_), 0, options_.clusters),
                              ClusterPages(options_.group_tokens, pages_a_cluster(options_))});
    }
  }
}

void ClusterStore::select_sequences(std::span<const int64_t> indices) {
  sequences_ = static_cast<int64_t>(indices.size());
  for (std::vector<ClusterRow>& rows : rows_) {
    if (rows.empty()) continue;
    // The last that continues a row takes its memory, others copy it.
    std::vector<int64_t> left(rows.size());
    for (const int64_t index : indices) ++left[index];
    std::vector<ClusterRow> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) {
      --left[index] > 0 ? selected.push_back(rows[index])
                        : selected.push_back(std::move(rows[index]));
    }
    rows = std::move(selected);
  }
}

void ClusterStore::grow(int64_t layer, int64_t tokens) {
  if (!has(layer) || tokens <= room_[layer]) return;
  room_[layer] = room_for(tokens);
  for (ClusterRow& row : rows_[layer]) {
    row.clusters.grow(room_[layer]);
    row.pages.grow(room_[layer], row.clusters.table().clusters_max());
  }
}

int64_t ClusterStore::room_for(int64_t tokens) {
  return (tokens + kGrowTokens - 1) / kGrowTokens * kGrowTokens;
}

int64_t ClusterStore::tokens_most(const MethodOptions& options) {
  const int64_t tokens = pages_a_cluster(options) * options.group_tokens;
  const int64_t clusters = std::numeric_limits<int32_t>::max() / tokens;
  // The inverse of clusters_max().
  return 4 * options.clusters.cluster_tokens * clusters / 5 / kGrowTokens * kGrowTokens;
}

int64_t ClusterStore::row_bytes(const MethodOptions& options, int64_t room) {
  if (room == 0) return 0;
  const int64_t clusters = options.clusters.clusters_max(room);
  // What waits is told apart in lists, by AdaptiveClusters and by ClusterPages.
  const int64_t waiting = 3 * (options.clusters.waiting_max() + options.group_tokens);
  return AdaptiveClusters::bytes(width_of(options), room, options.clusters) +
         ClusterPages::bytes(room, clusters, pages_a_cluster(options)) +
         waiting * int64_t{sizeof(int64_t)};
}

int64_t ClusterStore::pages_max(const MethodOptions& options, int64_t tokens) {
  const int64_t clusters = options.clusters.clusters_max(room_for(tokens));
  return std::min(tokens, tokens / options.group_tokens + clusters);
}

}  // namespace kvswap
