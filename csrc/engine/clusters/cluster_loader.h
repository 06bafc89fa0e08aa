#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/backend/fetcher.h"
#include "engine/clusters/token_locator.h"

namespace kvswap {

/// Pages of clusters that are read for tokens that wait, of several rows of a layer at once.
///
/// begin(), add() as long as there is room, finish(): then TokenLocator have them, until
/// forget() of theirs. After an error that is due at once. Not thread-safe.
class ClusterLoader {
 public:
  explicit ClusterLoader(EngineContext& context) : context_(context) {}

  /// Waits for what was abandoned, and still lands in the memory.
  Status begin(int64_t layer);
  /// The pages of these tokens that are not in memory. False: there is no room for them beside
  /// what was added before.
  bool add(TokenLocator& bytes, int64_t sequence, std::span<const int64_t> tokens);
  Status finish();

 private:
  EngineContext& context_;
  Fetch fetch_;
  std::shared_ptr<std::byte> memory_;  // [cluster_read_pages(), record_bytes]
};

}  // namespace kvswap
