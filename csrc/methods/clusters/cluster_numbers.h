#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "methods/clusters/cluster_store.h"

namespace kvswap {

/// All that a row's clusters are, keys and values left out: for a saved session or a fork.
struct ClusterNumbers {
  struct Pending {
    int32_t cluster = 0;  // that the token waits for
    int32_t token = 0;
  };
  std::vector<int32_t> clusters;    // [tokens]: a token's cluster, or where else it is
  std::vector<int32_t> places;      // [tokens]: as ClusterPages has them
  std::vector<float> centroids;     // [clusters, width]
  std::vector<double> variances;    // [clusters]
  std::vector<int32_t> comparable;  // [clusters]: members that are
  std::optional<double> threshold;
  int64_t settled_at = 0;  // tokens; 0: not known
  std::vector<Pending> pending;

  /// Into a row without tokens that has room for them; fault_of() has found none.
  void restore(ClusterRow& row) const;

 private:
  void restore(ClusterTable& table) const;
};

/// What a row may be, of a session that holds so many sealed tokens.
struct ClusterLimits {
  int64_t tokens = 0;
  int64_t room = 0;  // of the row; see ClusterStore
  int64_t width = 0;
  int64_t page_tokens = 0;
  int64_t pages_a_cluster = 0;
  ClusterOptions options;
};

/// What must hold and does not, of which tensor.
struct ClusterFault {
  const char* tensor = "";
  std::string must;
};

/// Everything is checked, since nothing in a file may make a session read or write where nothing
/// is, or wait for what never comes. Nothing: they may be restored.
std::optional<ClusterFault> fault_of(const ClusterNumbers& numbers, const ClusterLimits& limits);
}  // namespace kvswap
