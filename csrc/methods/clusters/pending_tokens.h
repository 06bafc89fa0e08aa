#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvswap {

/// Tokens that wait for a cluster to be split, or for others to be clustered with, in the order in
/// which they came.
class PendingTokens {
 public:
  static constexpr int64_t kNoCluster = -1;

  struct Waiting {
    int64_t cluster;
    int64_t token;
  };
  /// In the order in which they came.
  const std::vector<Waiting>& all() const { return waiting_; }

  int64_t count() const { return static_cast<int64_t>(waiting_.size()); }
  void add(int64_t cluster, int64_t token) { waiting_.push_back({cluster, token}); }

  /// Clusters that tokens wait for, rising.
  std::vector<int64_t> clusters() const {
    std::vector<int64_t> found;
    for (const Waiting& each : waiting_) {
      if (each.cluster != kNoCluster) found.push_back(each.cluster);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
  /// The lowest of those that most wait for; there is one.
  int64_t most_waited_for() const {
    const auto tokens = [this](int64_t cluster) {
      return std::count_if(waiting_.begin(), waiting_.end(),
                           [&](const Waiting& each) { return each.cluster == cluster; });
    };
    const std::vector<int64_t> all = clusters();
    return *std::max_element(all.begin(), all.end(),
                             [&](int64_t a, int64_t b) { return tokens(a) < tokens(b); });
  }
  /// Which cluster a token waits for; kNoCluster: for none.
  int64_t waits_for(int64_t token) const {
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Waiting& each) { return each.token == token; });
    return found == waiting_.end() ? kNoCluster : found->cluster;
  }

  /// Those of a cluster wait no more.
  std::vector<int64_t> take(int64_t cluster) {
    std::vector<int64_t> tokens;
    std::erase_if(waiting_, [&](const Waiting& each) {
      if (each.cluster == cluster) tokens.push_back(each.token);
      return each.cluster == cluster;
    });
    return tokens;
  }
  /// Nor do those from this one on.
  void truncate(int64_t tokens) {
    std::erase_if(waiting_, [&](const Waiting& each) { return each.token >= tokens; });
  }

 private:
  std::vector<Waiting> waiting_;
};

}  // namespace kvswap
