#include "engine/clusters/cluster_updater.h"

#include <algorithm>
#include <utility>

#include "io/stopwatch.h"
#include "methods/clusters/cluster_selector.h"

namespace kvswap {

namespace {

/// Keys in fp32 of a block of a prompt, with what its k-means sums up.
int64_t block_key_bytes(const MethodOptions& method) {
  const ClusterOptions& clusters = method.clusters;
  const int64_t width = method.kv_heads * method.head_dim;
  const int64_t centroids = clusters.block_tokens / clusters.cluster_tokens + 1;
  return clusters.block_tokens * width * int64_t{sizeof(float)} +
         centroids * width * int64_t{sizeof(float) + sizeof(double)};
}

/// The same of a cluster that splits, and of what enters one.
int64_t row_key_bytes(const MethodOptions& method) {
  const ClusterOptions& clusters = method.clusters;
  const int64_t waiting = clusters.waiting_max() + method.group_tokens;
  // Later tokens that are clustered among themselves stand side by side for it.
  const int64_t side_by_side = clusters.update == ClusterUpdate::kLocal ? 2 * waiting : 0;
  return (clusters.cluster_tokens_max + waiting + side_by_side) * method.kv_heads *
         method.head_dim * int64_t{sizeof(float)};
}

/// Rows whose tokens enter clusters at a time, on so many threads at most: no block of a prompt has
/// its keys in memory meanwhile.
int64_t rows_at_once(const MethodOptions& method) {
  const int64_t ahead = method.group_tokens * method.kv_heads * method.head_dim;
  const int64_t each = row_key_bytes(method) + ahead * int64_t{sizeof(float)};
  return std::max<int64_t>(1, block_key_bytes(method) / each);
}

}  // namespace

void ClusterUpdater::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  if (!plan.has_clusters) return;
  const int64_t room = ClusterStore::room_for(plan.sealed_tokens(extent.context));
  // Keys, pages that are read for a cluster, and a row that grows beside what it grows to.
  arena.take(Use::kStaging, block_key_bytes(plan.method) + row_key_bytes(plan.method) +
                                plan.cluster_read_pages * plan.record_bytes +
                                ClusterStore::row_bytes(plan.method, room));
}

int64_t ClusterUpdater::sealed(int64_t layer) const {
  return batch_.layer(layer).sealed_groups * context_.options.group_tokens;
}

bool ClusterUpdater::needs_catch_up(int64_t layer) const {
  if (context_.clusters_of(layer) == nullptr) return false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const ClusterRow& row = context_.clusters->of(layer, sequence);
    if (row.clusters.left() < sealed(layer) ||
        std::ssize(row.pages.waiting()) > context_.clusters->options().waiting_max()) {
      return true;
    }
  }
  return false;
}

Status ClusterUpdater::catch_up(int64_t layer) {
  if (!needs_catch_up(layer)) return Status::ok();
  const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer},
                        &context_.counters.cluster_seconds);
  std::vector<EnteringRow> rows;
  rows.reserve(batch_.size());
  for (int64_t i = 0; i < batch_.size(); ++i) rows.push_back(row_of(layer, i));
  return counted(rows, [&] { return catch_up_rows(rows); });
}

Status ClusterUpdater::counted(std::span<EnteringRow> rows, const std::function<Status()>& enter) {
  const auto counts = [&] {
    ClusterCounts sum;
    for (const EnteringRow& row : rows) {
      sum.splits += row.data().clusters.counts().splits;
      sum.refused += row.data().clusters.counts().refused;
    }
    return sum;
  };
  const ClusterCounts before = counts();
  Status entered = enter();
  const ClusterCounts after = counts();
  context_.counters.cluster_splits += after.splits - before.splits;
  context_.counters.cluster_splits_refused += after.refused - before.refused;
  return entered;
}

Status ClusterUpdater::catch_up_rows(std::span<EnteringRow> rows) {
  const auto needs_catch_up = [&](const EnteringRow& row) {
    return row.data().clusters.left() < sealed(row.layer);
  };
  // What an error left.
  KVSWAP_RETURN_IF_ERROR(settling_.drain(rows));
  while (std::ranges::any_of(rows, needs_catch_up)) {
    KVSWAP_RETURN_IF_ERROR(enter_next_groups(rows));
    KVSWAP_RETURN_IF_ERROR(settling_.drain(rows));
  }
  return Status::ok();
}

Status ClusterUpdater::enter_next_groups(std::span<EnteringRow> rows) {
  const RecordShape shape = context_.plan.record_shape;
  const int64_t group_tokens = shape.group_tokens;
  const auto enter = [&](EnteringRow& row, const std::byte* page) {
    row.bytes.set_arriving(
        [=](int64_t token) { return token_of_page(shape, page, token % group_tokens); });
    enter_one_by_one(row, row.data().clusters.left() + group_tokens);
  };
  std::vector<EnteringRow*> in_tail;
  for (EnteringRow& row : rows) {
    if (row.data().clusters.left() >= sealed(row.layer)) continue;
    const int64_t group = row.data().clusters.left() / group_tokens;
    if (group >= batch_.layer(row.layer).first_in_tail) {
      in_tail.push_back(&row);
      continue;
    }
    auto made = share_aligned_bytes(context_.record_bytes(), context_.options.memory_at_end());
    if (!made.is_ok()) return made.status();
    const std::shared_ptr<std::byte> memory = std::move(made.value());
    KVSWAP_RETURN_IF_ERROR(past_.load({row.layer, row.sequence, group, 1}, memory.get(), memory));
    enter(row, memory.get());
  }
  const int64_t some = rows_at_once(context_.plan.method);
  for (int64_t first = 0; first < std::ssize(in_tail); first += some) {
    const auto count = std::min(some, std::ssize(in_tail) - first);
    run_parallel({.parallel = context_.threads()}, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = first + begin; i < first + end; ++i) {
        EnteringRow& row = *in_tail[i];
        const int64_t group = row.data().clusters.left() / group_tokens;
        enter(row, batch_.pages(row.sequence).tail_page(row.layer, group));
      }
    });
  }
  return Status::ok();
}

Status ClusterUpdater::enter_chunk(int64_t layer, const KeyValueView& tokens,
                                   int64_t first_position) {
  if (context_.clusters_of(layer) == nullptr) return Status::ok();
  const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer},
                        &context_.counters.cluster_seconds);
  const RecordShape shape = context_.plan.record_shape;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    EnteringRow row = row_of(layer, sequence);
    row.bytes.set_arriving([&](int64_t token) {
      if (token >= first_position) return token_of(shape, tokens, sequence, token - first_position);
      const std::byte* page = batch_.pages(sequence).tail_page(layer, token / shape.group_tokens);
      return token_of_page(shape, page, token % shape.group_tokens);
    });
    KVSWAP_RETURN_IF_ERROR(counted({&row, 1}, [&] { return enter_row(row); }));
  }
  return Status::ok();
}

Status ClusterUpdater::enter_row(EnteringRow& row) {
  const AdaptiveClusters& clusters = row.data().clusters;
  const int64_t block = context_.clusters->options().block_tokens;
  while (clusters.left() < sealed(row.layer)) {
    const int64_t left = sealed(row.layer) - clusters.left();
    if (left >= context_.clusters->options().block_min()) {
      KVSWAP_RETURN_IF_ERROR(enter_block(row, clusters.left() + std::min(left, block)));
    } else {
      const int64_t some = std::min(left, context_.options.group_tokens);
      enter_one_by_one(row, clusters.left() + some);
      KVSWAP_RETURN_IF_ERROR(settling_.drain({&row, 1}));
    }
  }
  return Status::ok();
}

bool ClusterUpdater::is_outside(const EnteringRow& row, int64_t token) const {
  const int64_t group = token / context_.options.group_tokens;
  return !batch_.validity(row.sequence).is_valid(token) || batch_.is_sink(row.sequence, group);
}

/// A block of a prompt: its clusters are written as they come out of k-means.
Status ClusterUpdater::enter_block(EnteringRow& row, int64_t end) {
  ClusterRow& data = row.data();
  const RecordShape shape = context_.plan.record_shape;
  const int64_t width = shape.kv_heads * shape.head_dim;
  const int64_t begin = data.clusters.left();
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
  const std::vector<int64_t> made =
      data.clusters.enter_prompt(keys, end, {.parallel = context_.threads()});
  keys_ = {};
  std::vector<int64_t> index_of(data.clusters.table().count(), -1);  // in made
  for (size_t i = 0; i < made.size(); ++i) index_of[made[i]] = static_cast<int64_t>(i);
  std::vector<std::vector<int64_t>> members(made.size());
  std::vector<int64_t> others;
  for (int64_t token = begin; token < end; ++token) {
    const int32_t cluster = data.clusters.table().place()[token];
    if (cluster >= 0 && index_of[cluster] >= 0) {
      members[index_of[cluster]].push_back(token);
    } else if (cluster >= 0) {
      others.push_back(token);
    }
  }
  std::vector<ClusterPlan> plans;
  for (size_t i = 0; i < made.size(); ++i) {
    if (auto plan = data.pages.plan(made[i], members[i])) plans.push_back(std::move(*plan));
  }
  KVSWAP_RETURN_IF_ERROR(writer_.write(row.bytes, row.layer, row.sequence, plans));
  // Of a row whose clusters are full: they joined older ones.
  const int64_t room = context_.plan.waiting_pages * context_.options.group_tokens;
  for (const int64_t token : others) {
    if (std::ssize(data.pages.waiting()) == room)
      KVSWAP_RETURN_IF_ERROR(settling_.drain({&row, 1}));
    // With its cluster it may have been packed meanwhile.
    if (data.pages.place(token) < 0) enter_waiting(row, token);
  }
  return settling_.drain({&row, 1});
}

void ClusterUpdater::enter_one_by_one(EnteringRow& row, int64_t end) {
  ClusterRow& data = row.data();
  const KeyRows keys = row.keys();
  const auto is_read = [&](int64_t cluster) {
    return row.bytes.has_pages_in_memory(cluster, TokenLocator::Of::kAllPages) &&
           row.bytes.are_in_memory(members_of(data.clusters, cluster));
  };
  const int64_t begin = data.clusters.left();
  for (int64_t token = begin; token < end; ++token) {
    if (is_outside(row, token)) data.clusters.put_outside(token);
  }
  data.clusters.look_ahead(keys, end);
  for (int64_t token = begin; token < end; ++token) {
    if (data.clusters.table().place()[token] != kInSinks) enter_waiting(row, token);
    row.bytes.forget_keys();
    data.clusters.enter_token(keys, token, is_read);
  }
  row.bytes.forget_keys();
}

void ClusterUpdater::enter_waiting(const EnteringRow& row, int64_t token) {
  ClusterPages& pages = row.data().pages;
  const TokenBytes bytes = row.bytes.at(token);
  const int64_t place = std::ssize(pages.waiting());
  put_token(context_.plan.record_shape, row.bytes.waiting_page(place), place % pages.page_tokens(),
            bytes);
  pages.wait(token);
}

}  // namespace kvswap
