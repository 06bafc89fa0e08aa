#include "engine/clusters/cluster_loader.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {

Status ClusterLoader::begin(int64_t layer) {
  fetch_.layer = layer;
  fetch_.loads.clear();
  if (memory_ != nullptr && memory_.use_count() > 1) {
    KVSWAP_RETURN_IF_ERROR(context_.fetcher->drain_abandoned());
  }
  if (memory_ != nullptr) return Status::ok();
  auto made = share_aligned_bytes(context_.plan.cluster_read_pages * context_.record_bytes(),
                                  context_.options.memory_at_end());
  if (!made.is_ok()) return made.status();
  memory_ = std::move(made.value());
  return Status::ok();
}

bool ClusterLoader::add(TokenLocator& bytes, int64_t sequence, std::span<const int64_t> tokens) {
  const ClusterPages& pages = bytes.row().pages;
  std::vector<int64_t> slots;
  for (const int64_t token : tokens) {
    if (!bytes.is_in_memory(token)) slots.push_back(pages.place(token) / pages.page_tokens());
  }
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  if (std::ssize(fetch_.loads) + std::ssize(slots) > context_.plan.cluster_read_pages) {
    KVSWAP_ASSERT(!fetch_.loads.empty());
    return false;
  }
  for (const int64_t slot : slots) {
    std::byte* target = memory_.get() + std::ssize(fetch_.loads) * context_.record_bytes();
    fetch_.loads.push_back({.sequence = sequence, .group = page_id(slot), .target = target});
    bytes.add_read(slot, target);
  }
  return true;
}

Status ClusterLoader::finish() {
  Status arrived = context_.fetcher->submit(fetch_);
  if (arrived.is_ok()) arrived = context_.fetcher->finish(fetch_);
  if (arrived.is_pending()) context_.fetcher->abandon(fetch_, memory_);
  context_.counters.cluster_records_read += fetch_.loads.size();
  return arrived;
}

}  // namespace kvswap
