#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvswap {

/// How tokens enter clusters that come after a prompt (DynaKV, figure 1).
enum class ClusterUpdate {
  kAdaptive,  // they join the nearest, which is split where it gets too wide or too large
  kStatic,    // they join the nearest that has room, whose centroid stays; nothing is split
  kLocal,     // they wait, and are clustered among themselves
};

/// "adaptive", "static" or "local".
std::optional<ClusterUpdate> parse_cluster_update(const std::string& word);

struct ClusterOptions {
  int64_t cluster_tokens = 32;      // that k-means aims at
  int64_t cluster_tokens_max = 64;  // that no cluster exceeds
  double split_factor = 1.25;       // too wide: so many times the mean variance of the row
  int64_t pending_tokens = 16;      // that wait; with so many a cluster is read for them
  int64_t sink_tokens = 0;          // first ones, which enter no cluster
  int64_t block_tokens = 8192;      // of a prompt, clustered by themselves: the cost is linear
  ClusterUpdate update = ClusterUpdate::kAdaptive;

  static constexpr int64_t kLocalClusters = 4;  // made at once of later tokens

  /// What is wrong with them; empty: nothing.
  std::string fault() const;
  /// So many tokens at least are clustered together when they leave the tail at once.
  int64_t block_min() const { return 2 * cluster_tokens; }
  /// Tokens that wait at most at the end of a step: local ones until they fill some clusters.
  int64_t waiting_max() const {
    return update == ClusterUpdate::kLocal ? kLocalClusters * cluster_tokens : pending_tokens;
  }
  /// Clusters of so many tokens at most: ceil(1.25 tokens / cluster_tokens).
  int64_t clusters_max(int64_t tokens) const {
    return (5 * tokens + 4 * cluster_tokens - 1) / (4 * cluster_tokens);
  }
};

}  // namespace kvswap
