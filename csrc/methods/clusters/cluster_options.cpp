#include "methods/clusters/cluster_options.h"

#include <algorithm>

namespace kvswap {

std::optional<ClusterUpdate> parse_cluster_update(const std::string& word) {
  if (word == "adaptive") return ClusterUpdate::kAdaptive;
  if (word == "static") return ClusterUpdate::kStatic;
  if (word == "local") return ClusterUpdate::kLocal;
  return std::nullopt;
}

std::string ClusterOptions::fault() const {
  if (cluster_tokens < 1 || cluster_tokens > cluster_tokens_max) {
    return "cluster_tokens must be at least 1 and at most cluster_tokens_max, got " +
           std::to_string(cluster_tokens) + " and " + std::to_string(cluster_tokens_max);
  }
  if (block_tokens < 2 * cluster_tokens) {
    return "block_tokens must be at least twice cluster_tokens, got " +
           std::to_string(block_tokens) + " and " + std::to_string(cluster_tokens);
  }
  if (!(split_factor > 0) || std::min(pending_tokens, sink_tokens) < 0) {
    return "split_factor must be above 0, pending_tokens and sink_tokens at least 0, got " +
           std::to_string(split_factor) + ", " + std::to_string(pending_tokens) + " and " +
           std::to_string(sink_tokens);
  }
  return {};
}

}  // namespace kvswap
