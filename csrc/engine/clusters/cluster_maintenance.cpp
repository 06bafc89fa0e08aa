#include "engine/clusters/cluster_maintenance.h"

#include <algorithm>
#include <utility>

namespace kvswap {

KeyRows EnteringRow::keys() const {
  KeyRows keys;
  keys.width = data().clusters.table().width();
  keys.source = &bytes;
  return keys;
}

int64_t EnteringRow::other_in_slots(int64_t cluster) const {
  const AdaptiveClusters& clusters = data().clusters;
  return data().pages.other_in_slots(cluster, clusters.table().place().first(clusters.left()));
}

bool ClusterMaintenance::too_many_wait(const EnteringRow& row) const {
  return std::ssize(row.data().pages.waiting()) > context_.clusters->options().waiting_max();
}

Status ClusterMaintenance::drain(std::span<EnteringRow> rows) {
  for (EnteringRow& row : rows) KVSWAP_RETURN_IF_ERROR(settle_in_memory(row));
  while (std::ranges::any_of(rows, [this](const EnteringRow& row) { return too_many_wait(row); })) {
    Status forced = force_some(rows);
    for (EnteringRow& row : rows) row.bytes.forget_read();
    KVSWAP_RETURN_IF_ERROR(forced);
  }
  for (const EnteringRow& row : rows) row.data().free_numbers();
  return Status::ok();
}

Status ClusterMaintenance::settle_in_memory(EnteringRow& row) {
  AdaptiveClusters& clusters = row.data().clusters;
  const KeyRows keys = row.keys();
  for (const int64_t cluster : clusters.waiting().clusters()) {
    if (!row.bytes.has_pages_in_memory(cluster, TokenLocator::Of::kAllPages) ||
        !row.bytes.are_in_memory(members_of(clusters, cluster))) {
      continue;
    }
    row.bytes.forget_keys();
    clusters.take_in(keys, cluster);
  }
  row.bytes.forget_keys();
  clusters.cluster_later(keys);
  row.bytes.forget_keys();
  KVSWAP_RETURN_IF_ERROR(pack_changed(row));
  return too_many_wait(row) ? pack_some(row) : Status::ok();
}

/// What a split has changed: the pages of the older clusters hold tokens of the newer ones, which
/// go first. They have the higher numbers, unless they were given one again.
Status ClusterMaintenance::pack_changed(EnteringRow& row) {
  std::vector<int64_t> left = row.data().clusters.changed();
  row.data().clusters.end_step();
  std::ranges::reverse(left);
  for (bool has_written = true; has_written && !left.empty();) {
    has_written = false;
    std::vector<int64_t> later;
    for (const int64_t cluster : left) {
      auto plan = writer_.plan(row.bytes, row.layer, row.sequence, cluster);
      if (plan && row.bytes.are_in_memory(plan->tokens)) {
        KVSWAP_RETURN_IF_ERROR(writer_.write(row.bytes, row.layer, row.sequence, {&*plan, 1}));
        has_written = true;
      } else if (!plan && row.other_in_slots(cluster) >= 0) {
        later.push_back(cluster);
      }
    }
    left = std::move(later);
  }
  return Status::ok();
}

/// Clusters that tokens wait to be packed with, and whose pages are in memory.
Status ClusterMaintenance::pack_some(EnteringRow& row) {
  const ClusterRow& data = row.data();
  std::vector<int32_t> clusters;
  for (const int64_t token : data.pages.waiting()) {
    const int32_t cluster = data.clusters.table().place()[token];
    if (cluster >= 0) clusters.push_back(cluster);
  }
  std::sort(clusters.begin(), clusters.end());
  clusters.erase(std::unique(clusters.begin(), clusters.end()), clusters.end());
  std::vector<ClusterPlan> plans;
  for (const int32_t cluster : clusters) {
    if (!row.bytes.has_pages_in_memory(cluster, TokenLocator::Of::kPagesWithRoom)) continue;
    auto plan = writer_.plan(row.bytes, row.layer, row.sequence, cluster);
    if (!plan || !row.bytes.are_in_memory(plan->tokens)) continue;
    plans.push_back(std::move(*plan));
    if (!writer_.writes_apart()) continue;
    // Where the next one has room depends on it.
    KVSWAP_RETURN_IF_ERROR(writer_.write(row.bytes, row.layer, row.sequence, plans));
    plans.clear();
  }
  return writer_.write(row.bytes, row.layer, row.sequence, plans);
}

Status ClusterMaintenance::force_some(std::span<EnteringRow> rows) {
  KVSWAP_RETURN_IF_ERROR(reads_.begin(rows.front().layer));
  std::vector<Forced> reading;
  bool has_room = true;
  for (size_t i = 0; i < rows.size() && has_room; ++i) {
    for (const Forced& forced : find_forced(rows[i])) {
      has_room = reads_.add(rows[i].bytes, rows[i].sequence, taken_from(forced));
      if (!has_room) break;
      reading.push_back(forced);
    }
  }
  KVSWAP_ASSERT(!reading.empty());
  KVSWAP_RETURN_IF_ERROR(reads_.finish());
  for (const Forced& forced : reading) KVSWAP_RETURN_IF_ERROR(split_or_pack(forced));
  return Status::ok();
}

std::vector<int64_t> ClusterMaintenance::taken_from(const Forced& forced) const {
  const EnteringRow& row = *forced.row;
  if (forced.is_split) return members_of(row.data().clusters, forced.cluster);
  return writer_.plan(row.bytes, row.layer, row.sequence, forced.cluster)->tokens;
}

/// As many as let no more tokens wait than may.
std::vector<ClusterMaintenance::Forced> ClusterMaintenance::find_forced(EnteringRow& row) {
  const ClusterRow& data = row.data();
  int64_t over = std::ssize(data.pages.waiting()) - context_.clusters->options().waiting_max();
  std::vector<Forced> found;
  if (over <= 0) return found;
  const std::vector<int64_t> split = data.clusters.waiting().clusters();
  for (const ClusterRow::WaitedFor& waited : data.waited_for()) {
    if (over <= 0) break;
    over -= waited.tokens;
    Forced forced = {&row, waited.cluster, std::ranges::binary_search(split, waited.cluster)};
    // After an error: clusters that were split from it still stand in its pages, and go first.
    while (!forced.is_split &&
           !writer_.plan(row.bytes, row.layer, row.sequence, forced.cluster).has_value()) {
      forced.cluster = row.other_in_slots(forced.cluster);
      KVSWAP_ASSERT(forced.cluster >= 0);
    }
    found.push_back(forced);
  }
  return found;
}

Status ClusterMaintenance::split_or_pack(const Forced& forced) {
  EnteringRow& row = *forced.row;
  AdaptiveClusters& clusters = row.data().clusters;
  // What was done for others since may have changed what it takes: then it is the next one's turn.
  if (!forced.is_split) {
    const auto plan = writer_.plan(row.bytes, row.layer, row.sequence, forced.cluster);
    if (!plan || !row.bytes.are_in_memory(plan->tokens)) return Status::ok();
    return writer_.write(row.bytes, row.layer, row.sequence, {&*plan, 1});
  }
  if (!row.bytes.are_in_memory(members_of(clusters, forced.cluster))) return Status::ok();
  ++context_.counters.cluster_splits_forced;
  row.bytes.forget_keys();
  clusters.take_in(row.keys(), forced.cluster);
  row.bytes.forget_keys();
  return pack_changed(row);
}

}  // namespace kvswap
