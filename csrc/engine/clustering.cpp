#include "engine/clustering.h"

#include <algorithm>
#include <utility>

#include "engine/memory_need.h"
#include "io/stopwatch.h"
#include "methods/cluster_selector.h"

namespace kvswap {

int64_t Clustering::sealed(int64_t layer) const {
  return batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
}

bool Clustering::is_behind(int64_t layer) const {
  if (parts_.clusters_of(layer) == nullptr) return false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const ClusterRow& row = parts_.clusters->of(layer, sequence);
    if (row.clusters.left() < sealed(layer) ||
        std::ssize(row.pages.waiting()) > parts_.clusters->options().waiting_max()) {
      return true;
    }
  }
  return false;
}

Status Clustering::catch_up(int64_t layer) {
  if (!is_behind(layer)) return Status::ok();
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer},
                        &parts_.counters.cluster_seconds);
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    ClusterBytes bytes(parts_, batch_, layer, sequence);
    KVSWAP_RETURN_IF_ERROR(counted({layer, sequence, bytes}, &Clustering::catch_up_row));
  }
  return Status::ok();
}

Status Clustering::counted(const Row& row, Status (Clustering::*enter)(const Row& row)) {
  const ClusterCounts before = row.data().clusters.counts();
  Status entered = (this->*enter)(row);
  const ClusterCounts& after = row.data().clusters.counts();
  parts_.counters.cluster_splits += after.splits - before.splits;
  parts_.counters.cluster_splits_refused += after.refused - before.refused;
  return entered;
}

Status Clustering::catch_up_row(const Row& row) {
  const RecordShape shape = parts_.options.record_shape();
  const int64_t group_tokens = shape.group_tokens;
  Clusters& clusters = row.data().clusters;
  // What an error left.
  KVSWAP_RETURN_IF_ERROR(settle(row));
  while (clusters.left() < sealed(row.layer)) {
    const int64_t group = clusters.left() / group_tokens;
    const std::byte* page = tail_.page(row.layer, row.sequence, group);
    std::shared_ptr<std::byte> memory;
    if (group < batch_.layer(row.layer).first_in_tail) {
      auto made = share_aligned_bytes(parts_.record_bytes(), parts_.options.memory_at_end());
      if (!made.is_ok()) return made.status();
      memory = std::move(made.value());
      KVSWAP_RETURN_IF_ERROR(past_.load({row.layer, row.sequence, group, 1}, memory.get(), memory));
      page = memory.get();
    }
    row.bytes.set_arriving(
        [&](int64_t token) { return token_of_page(shape, page, token % group_tokens); });
    KVSWAP_RETURN_IF_ERROR(enter_one_by_one(row, (group + 1) * group_tokens));
  }
  return Status::ok();
}

Status Clustering::enter_chunk(int64_t layer, const KeyValueView& tokens, int64_t first_position) {
  if (parts_.clusters_of(layer) == nullptr) return Status::ok();
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer},
                        &parts_.counters.cluster_seconds);
  const RecordShape shape = parts_.options.record_shape();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    ClusterBytes bytes(parts_, batch_, layer, sequence);
    bytes.set_arriving([&](int64_t token) {
      if (token >= first_position) return token_of(shape, tokens, sequence, token - first_position);
      const std::byte* page = tail_.page(layer, sequence, token / shape.group_tokens);
      return token_of_page(shape, page, token % shape.group_tokens);
    });
    KVSWAP_RETURN_IF_ERROR(counted({layer, sequence, bytes}, &Clustering::enter_row));
  }
  return Status::ok();
}

Status Clustering::enter_row(const Row& row) {
  const Clusters& clusters = row.data().clusters;
  const int64_t block = parts_.clusters->options().block_tokens;
  while (clusters.left() < sealed(row.layer)) {
    const int64_t left = sealed(row.layer) - clusters.left();
    if (left >= parts_.clusters->options().block_min()) {
      KVSWAP_RETURN_IF_ERROR(enter_block(row, clusters.left() + std::min(left, block)));
    } else {
      const int64_t some = std::min(left, parts_.options.group_tokens);
      KVSWAP_RETURN_IF_ERROR(enter_one_by_one(row, clusters.left() + some));
    }
  }
  return Status::ok();
}

KeyRows Clustering::keys_of(const Row& row) {
  KeyRows keys;
  keys.width = row.data().clusters.table().width();
  keys.source = &row.bytes;
  return keys;
}

bool Clustering::is_outside(const Row& row, int64_t token) const {
  const int64_t group = token / parts_.options.group_tokens;
  return !batch_.validity(row.sequence).is_valid(token) || batch_.is_sink(row.sequence, group);
}

/// A block of a prompt: its clusters are written as they come out of k-means.
Status Clustering::enter_block(const Row& row, int64_t end) {
  ClusterRow& data = row.data();
  const RecordShape shape = parts_.options.record_shape();
  const int64_t width = shape.kv_heads * shape.head_dim;
  const int64_t begin = data.clusters.left();
  const int64_t known = data.clusters.table().count();
  keys_.resize((end - begin) * width);
  for (int64_t token = begin; token < end; ++token) {
    if (is_outside(row, token)) {
      data.clusters.put_outside(token);
    } else {
      row.bytes.copy_key(row.bytes.at(token), keys_.data() + (token - begin) * width);
    }
  }
  KeyRows keys;
  keys.data = keys_.data();
  keys.width = keys.stride = width;
  keys.first = begin;
  data.clusters.enter_prompt(keys, end, {.parallel = parts_.threads()});
  const int64_t made = data.clusters.table().count();
  std::vector<std::vector<int64_t>> members(made - known);
  std::vector<int64_t> others;
  for (int64_t token = begin; token < end; ++token) {
    const int32_t cluster = data.clusters.table().place()[token];
    if (cluster >= known) {
      members[cluster - known].push_back(token);
    } else if (cluster >= 0) {
      others.push_back(token);
    }
  }
  std::vector<ClusterPlan> plans;
  for (int64_t i = 0; i < std::ssize(members); ++i) {
    if (auto plan = data.pages.plan(known + i, members[i])) plans.push_back(std::move(*plan));
  }
  KVSWAP_RETURN_IF_ERROR(writer_.write(row.bytes, row.layer, row.sequence, plans));
  // Of a row whose clusters are full: they joined older ones.
  const int64_t room = waiting_pages(parts_.options) * parts_.options.group_tokens;
  for (const int64_t token : others) {
    if (std::ssize(data.pages.waiting()) == room) KVSWAP_RETURN_IF_ERROR(settle(row));
    enter_waiting(row, token);
  }
  return settle(row);
}

Status Clustering::enter_one_by_one(const Row& row, int64_t end) {
  ClusterRow& data = row.data();
  const KeyRows keys = keys_of(row);
  const auto is_read = [&](int64_t cluster) {
    return row.bytes.are_in_memory(data.clusters.members(cluster));
  };
  for (int64_t token = data.clusters.left(); token < end; ++token) {
    const bool is_outside = this->is_outside(row, token);
    is_outside ? data.clusters.put_outside(token) : enter_waiting(row, token);
    row.bytes.forget_keys();
    data.clusters.enter_token(keys, token, is_read);
  }
  return settle(row);
}

void Clustering::enter_waiting(const Row& row, int64_t token) {
  ClusterPages& pages = row.data().pages;
  const TokenBytes bytes = row.bytes.at(token);
  const int64_t place = std::ssize(pages.waiting());
  put_token(parts_.options.record_shape(), row.bytes.waiting_page(place),
            place % pages.page_tokens(), bytes);
  pages.wait(token);
}

Status Clustering::settle(const Row& row) {
  Clusters& clusters = row.data().clusters;
  const KeyRows keys = keys_of(row);
  for (const int64_t cluster : clusters.waiting().clusters()) {
    if (!row.bytes.are_in_memory(clusters.members(cluster))) continue;
    row.bytes.forget_keys();
    clusters.take_in(keys, cluster);
  }
  row.bytes.forget_keys();
  clusters.cluster_later(keys);
  row.bytes.forget_keys();
  KVSWAP_RETURN_IF_ERROR(pack_changed(row));
  const int64_t most = parts_.clusters->options().waiting_max();
  const auto waits = [&] { return std::ssize(row.data().pages.waiting()) > most; };
  if (waits()) KVSWAP_RETURN_IF_ERROR(pack_some(row));
  while (waits()) KVSWAP_RETURN_IF_ERROR(force(row));
  return Status::ok();
}

/// What a split has changed, the newest clusters first: the others' pages hold their tokens.
Status Clustering::pack_changed(const Row& row) {
  const std::vector<int64_t> changed = row.data().clusters.changed();
  row.data().clusters.end_step();
  for (size_t i = changed.size(); i-- > 0;) {
    auto plan = writer_.plan(row.bytes, row.layer, row.sequence, changed[i]);
    if (!plan || !row.bytes.are_in_memory(plan->tokens)) continue;
    KVSWAP_RETURN_IF_ERROR(writer_.write(row.bytes, row.layer, row.sequence, {&*plan, 1}));
  }
  return Status::ok();
}

/// Clusters that tokens wait to be packed with, and whose pages are in memory.
Status Clustering::pack_some(const Row& row) {
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

Status Clustering::force(const Row& row) {
  Clusters& clusters = row.data().clusters;
  const int64_t cluster = row.data().most_waited_for();
  const std::vector<int64_t> split = clusters.waiting().clusters();
  if (std::find(split.begin(), split.end(), cluster) == split.end()) return pack(row, cluster);
  KVSWAP_RETURN_IF_ERROR(read(row, clusters.members(cluster)));
  ++parts_.counters.cluster_splits_forced;
  row.bytes.forget_keys();
  clusters.take_in(keys_of(row), cluster);
  row.bytes.forget_keys();
  Status packed = pack_changed(row);
  row.bytes.forget_read();
  return packed;
}

Status Clustering::pack(const Row& row, int64_t cluster) {
  ClusterRow& data = row.data();
  for (;;) {
    auto plan = writer_.plan(row.bytes, row.layer, row.sequence, cluster);
    if (!plan) {
      // After an error: a cluster that was split from it still stands in its pages.
      const int64_t other = data.pages.other_in_slots(
          cluster, data.clusters.table().place().first(data.clusters.left()));
      if (other < 0) return Status::ok();
      KVSWAP_RETURN_IF_ERROR(pack(row, other));
      continue;
    }
    KVSWAP_RETURN_IF_ERROR(read(row, plan->tokens));
    Status written = writer_.write(row.bytes, row.layer, row.sequence, {&*plan, 1});
    row.bytes.forget_read();
    return written;
  }
}

/// The pages of these tokens that are not in memory: the reads are not overlapped.
Status Clustering::read(const Row& row, std::span<const int64_t> tokens) {
  const int64_t record_bytes = parts_.record_bytes();
  const int64_t most = cluster_read_pages(parts_.options);
  // What was abandoned still lands there.
  if (read_ != nullptr && read_.use_count() > 1) {
    KVSWAP_RETURN_IF_ERROR(parts_.fetcher->settle_abandoned());
  }
  if (read_ == nullptr) {
    auto made = share_aligned_bytes(most * record_bytes, parts_.options.memory_at_end());
    if (!made.is_ok()) return made.status();
    read_ = std::move(made.value());
  }
  Fetch fetch;
  fetch.layer = row.layer;
  for (const int64_t token : tokens) {
    if (row.bytes.is_in_memory(token)) continue;
    const int64_t slot = row.data().pages.place(token) / row.data().pages.page_tokens();
    std::byte* target = read_.get() + std::ssize(fetch.loads) * record_bytes;
    KVSWAP_ASSERT(std::ssize(fetch.loads) < most);
    fetch.loads.push_back({row.sequence, page_id(slot), -1, target, nullptr});
    row.bytes.add_read(slot, target);
  }
  Status arrived = parts_.fetcher->submit(fetch);
  if (arrived.is_ok()) {
    arrived = parts_.fetcher->finish(fetch);
    if (arrived.is_pending()) parts_.fetcher->abandon(fetch, read_);
  }
  if (!arrived.is_ok()) row.bytes.forget_read();
  parts_.counters.cluster_records_read += fetch.loads.size();
  return arrived;
}

}  // namespace kvswap
