#include "engine/cluster_reads.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "methods/cluster_selector.h"

namespace kvswap {

Status ClusterReads::begin(int64_t layer) {
  fetch_.layer = layer;
  fetch_.loads.clear();
  if (memory_ != nullptr && memory_.use_count() > 1) {
    KVSWAP_RETURN_IF_ERROR(parts_.fetcher->settle_abandoned());
  }
  if (memory_ != nullptr) return Status::ok();
  auto made = share_aligned_bytes(parts_.plan.cluster_read_pages * parts_.record_bytes(),
                                  parts_.options.memory_at_end());
  if (!made.is_ok()) return made.status();
  memory_ = std::move(made.value());
  return Status::ok();
}

bool ClusterReads::add(ClusterBytes& bytes, int64_t sequence, std::span<const int64_t> tokens) {
  const ClusterPages& pages = bytes.row().pages;
  std::vector<int64_t> slots;
  for (const int64_t token : tokens) {
    if (!bytes.is_in_memory(token)) slots.push_back(pages.place(token) / pages.page_tokens());
  }
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  if (std::ssize(fetch_.loads) + std::ssize(slots) > parts_.plan.cluster_read_pages) {
    KVSWAP_ASSERT(!fetch_.loads.empty());
    return false;
  }
  for (const int64_t slot : slots) {
    std::byte* target = memory_.get() + std::ssize(fetch_.loads) * parts_.record_bytes();
    fetch_.loads.push_back({sequence, page_id(slot), -1, target, nullptr});
    bytes.add_read(slot, target);
  }
  return true;
}

Status ClusterReads::finish() {
  Status arrived = parts_.fetcher->submit(fetch_);
  if (arrived.is_ok()) arrived = parts_.fetcher->finish(fetch_);
  if (arrived.is_pending()) parts_.fetcher->abandon(fetch_, memory_);
  parts_.counters.cluster_records_read += fetch_.loads.size();
  return arrived;
}

}  // namespace kvswap
