#include "engine/snapshot/saved_clusters.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "engine/sequence/token_codec.h"
#include "engine/snapshot/tensor_names.h"
#include "methods/clusters/cluster_numbers.h"
#include "methods/clusters/cluster_selector.h"

namespace kvswap {
namespace {

constexpr int64_t kCounts = 4;       // of a row: clusters, pending tokens, pages, room
constexpr double kNoThreshold = -1;  // as it is saved

/// Numbers of all of a layer's rows, one after the other.
struct LayerNumbers {
  std::vector<uint32_t> counts;      // [rows, kCounts]
  std::vector<double> thresholds;    // [rows]
  std::vector<uint32_t> settled;     // [rows]: tokens that had left the tail then
  std::vector<double> variances;     // [clusters]
  std::vector<uint32_t> comparable;  // [clusters]
  std::vector<int32_t> pending;      // [tokens, 2]: the cluster, the token
  std::vector<uint32_t> table;       // [pages]
};

template <typename T>
void list(int64_t layer, const char* what, const char* dtype, std::vector<T> values, int64_t width,
          std::vector<SavedTensor>& tensors) {
  if (values.empty()) return;
  const auto held = std::make_shared<const std::vector<T>>(std::move(values));
  std::vector<int64_t> shape = {std::ssize(*held) / width};
  if (width > 1) shape.push_back(width);
  const int64_t row_bytes = width * int64_t{sizeof(T)};
  tensors.push_back({saved_name(layer, what), dtype, std::move(shape), row_bytes,
                     [held, width, row_bytes](int64_t first, int64_t rows, std::byte* target) {
                       std::memcpy(target, held->data() + first * width, rows * row_bytes);
                       return Status::ok();
                     }});
}

/// Those of a file, which may not be there where there are none.
template <typename T>
Result<std::vector<T>> found(int64_t layer, const char* what, const char* dtype, int64_t rows,
                             int64_t width, const SavedTensors& saved) {
  if (rows == 0) return std::vector<T>();
  std::vector<int64_t> shape = {rows};
  if (width > 1) shape.push_back(width);
  auto bytes = saved.get(saved_name(layer, what), dtype, shape);
  if (!bytes.is_ok()) return bytes.status();
  return copied<T>(bytes.value());
}

int64_t width_of(const EngineContext& context) {
  return context.options.kv_heads * context.options.head_dim;
}

int64_t waiting_pages(const ClusterRow& row) {
  return (std::ssize(row.pages.waiting()) + row.pages.page_tokens() - 1) / row.pages.page_tokens();
}

void add_row(const EngineContext& context, int64_t layer, int64_t sequence,
             const std::vector<uint32_t>& numbers, LayerNumbers& all) {
  const ClusterRow& row = context.clusters->of(layer, sequence);
  const ClusterTable& table = row.clusters.table();
  const std::vector<int64_t> ids = cluster_page_ids(row);
  for (const int64_t one : {table.count(), row.clusters.waiting().count(), std::ssize(ids),
                            context.clusters->room(layer)}) {
    all.counts.push_back(static_cast<uint32_t>(one));
  }
  all.thresholds.push_back(row.clusters.threshold().variance.value_or(kNoThreshold));
  all.settled.push_back(static_cast<uint32_t>(row.clusters.threshold().settled_at));
  all.variances.insert(all.variances.end(), table.variance().begin(), table.variance().end());
  all.comparable.insert(all.comparable.end(), table.comparable().begin(), table.comparable().end());
  for (const auto& [cluster, token] : row.clusters.waiting().all()) {
    all.pending.push_back(static_cast<int32_t>(cluster));
    all.pending.push_back(static_cast<int32_t>(token));
  }
  for (const int64_t id : ids) {
    all.table.push_back(numbers[context.store->tables().number(layer, sequence, id)]);
  }
}

/// Which cluster each token of a row is in, and its place: what takes most of it is written as it
/// stands.
void list_tokens(const EngineContext& context, int64_t rows, int64_t layer, int64_t tokens,
                 std::vector<SavedTensor>& tensors) {
  const int64_t row_bytes = 2 * tokens * int64_t{sizeof(int32_t)};
  tensors.push_back({saved_name(layer, "clusters"),
                     "I32",
                     {rows, tokens, 2},
                     row_bytes,
                     [&context, layer, tokens](int64_t first, int64_t count, std::byte* target) {
                       for (int64_t i = 0; i < count * tokens; ++i) {
                         const ClusterRow& row = context.clusters->of(layer, first + i / tokens);
                         const int64_t token = i % tokens;
                         const int32_t both[] = {row.clusters.table().place()[token],
                                                 row.pages.place(token)};
                         std::memcpy(target + i * int64_t{sizeof(both)}, both, sizeof(both));
                       }
                       return Status::ok();
                     }});
}

void list_centroids(const EngineContext& context, int64_t rows, int64_t layer,
                    std::vector<SavedTensor>& tensors) {
  std::vector<int64_t> ends;  // of each row's
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    ends.push_back(count += context.clusters->of(layer, row).clusters.table().count());
  }
  if (count == 0) return;
  const int64_t width = width_of(context);
  const auto read = [&context, layer, width, ends](int64_t first, int64_t some, std::byte* target) {
    std::vector<float> centroid(width);
    for (int64_t i = first; i < first + some; ++i, target += width * sizeof(float)) {
      const auto row = std::ranges::upper_bound(ends, i) - ends.begin();
      const ClusterTable& table = context.clusters->of(layer, row).clusters.table();
      table.centroid(i - (row == 0 ? 0 : ends[row - 1]), centroid);
      std::memcpy(target, centroid.data(), width * sizeof(float));
    }
    return Status::ok();
  };
  tensors.push_back({saved_name(layer, "centroids"),
                     "F32",
                     {count, width},
                     width * int64_t{sizeof(float)},
                     read});
}

/// Of waiting tokens alone: a page may have had others before.
void list_waiting(const EngineContext& context, const Batch& batch, int64_t layer,
                  std::vector<SavedTensor>& tensors) {
  const EngineOptions& options = context.options;
  struct Page {
    int64_t sequence;
    int64_t index;
  };
  std::vector<Page> pages;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    const int64_t count = waiting_pages(context.clusters->of(layer, sequence));
    for (int64_t page = 0; page < count; ++page) pages.push_back({sequence, page});
  }
  if (pages.empty()) return;
  const int64_t bytes = context.plan.group_bytes;
  const auto count = std::ssize(pages);
  const auto read = [&context, &batch, layer, bytes, pages = std::move(pages)](
                        int64_t first, int64_t rows, std::byte* target) {
    const RecordShape shape = context.plan.record_shape;
    for (int64_t i = first; i < first + rows; ++i, target += bytes) {
      const auto [sequence, index] = pages[i];
      const ClusterPages& row = context.clusters->of(layer, sequence).pages;
      const std::byte* page = batch.pages(sequence).waiting_page(layer, index);
      const int64_t left = std::ssize(row.waiting()) - index * row.page_tokens();
      std::memset(target, 0, bytes);
      for (int64_t token = 0; token < std::min(left, row.page_tokens()); ++token) {
        put_token(shape, target, token, token_of_page(shape, page, token));
      }
    }
    return Status::ok();
  };
  tensors.push_back({saved_name(layer, "cluster_waiting"), saved_dtype(options.dtype),
                     saved_page_sizes(context.plan.record_shape, count), bytes, read});
}

/// Of one row: what the file has of it, from these on.
struct RowAt {
  int64_t sequence = 0;
  int64_t cluster = 0;
  int64_t pending = 0;
  int64_t page = 0;
};

struct SavedLayerOfClusters {
  LayerNumbers all;
  std::vector<int32_t> tokens;  // [rows, tokens, 2]
  std::vector<float> centroids;
};

Result<std::vector<uint32_t>> counts_of(int64_t layer, const SavedCounts& counts,
                                        const SavedTensors& saved) {
  return found<uint32_t>(layer, "cluster_counts", "U32", counts.sequences, kCounts, saved);
}

Status read_layer(const EngineContext& context, int64_t layer, const SavedCounts& counts,
                  const SavedTensors& saved, SavedLayerOfClusters& read) {
  const int64_t rows = counts.sequences;
  const int64_t tokens = counts.groups * context.options.group_tokens;
  const auto take = [](auto result, auto& target) {
    if (result.is_ok()) target = std::move(result.value());
    return result.status();
  };
  LayerNumbers& all = read.all;
  KVSWAP_RETURN_IF_ERROR(take(counts_of(layer, counts, saved), all.counts));
  int64_t totals[kCounts] = {};
  for (size_t i = 0; i < all.counts.size(); ++i) totals[i % kCounts] += all.counts[i];
  const auto& [clusters, pending, pages, rooms] = totals;
  const auto f64 = [&](const char* what, int64_t count) {
    return found<double>(layer, what, "F64", count, 1, saved);
  };
  KVSWAP_RETURN_IF_ERROR(take(f64("cluster_thresholds", rows), all.thresholds));
  all.settled.assign(rows, 0);
  if (saved.has(saved_name(layer, "cluster_settled"))) {
    KVSWAP_RETURN_IF_ERROR(
        take(found<uint32_t>(layer, "cluster_settled", "U32", rows, 1, saved), all.settled));
  }
  KVSWAP_RETURN_IF_ERROR(take(f64("cluster_variances", clusters), all.variances));
  KVSWAP_RETURN_IF_ERROR(take(
      found<uint32_t>(layer, "cluster_comparable", "U32", clusters, 1, saved), all.comparable));
  KVSWAP_RETURN_IF_ERROR(
      take(found<int32_t>(layer, "cluster_pending", "I32", pending, 2, saved), all.pending));
  KVSWAP_RETURN_IF_ERROR(
      take(found<uint32_t>(layer, "cluster_table", "U32", pages, 1, saved), all.table));
  KVSWAP_RETURN_IF_ERROR(take(
      found<float>(layer, "centroids", "F32", clusters, width_of(context), saved), read.centroids));
  const int64_t sizes[] = {rows, tokens, 2};
  auto of_tokens = saved.get(saved_name(layer, "clusters"), "I32", sizes);
  if (!of_tokens.is_ok()) return of_tokens.status();
  read.tokens = copied<int32_t>(of_tokens.value());
  return Status::ok();
}

ClusterNumbers numbers_of(const SavedLayerOfClusters& read, const RowAt& at, int64_t tokens,
                          int64_t width) {
  const LayerNumbers& all = read.all;
  const auto part = [](const auto& values, int64_t first, int64_t count) {
    return std::span(values).subspan(first, count);
  };
  const int64_t count = all.counts[at.sequence * kCounts];
  const int64_t pending = all.counts[at.sequence * kCounts + 1];
  ClusterNumbers numbers;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t i = 2 * (at.sequence * tokens + token);
    numbers.clusters.push_back(read.tokens[i]);
    numbers.places.push_back(read.tokens[i + 1]);
  }
  const auto centroids = part(read.centroids, at.cluster * width, count * width);
  numbers.centroids.assign(centroids.begin(), centroids.end());
  const auto variances = part(all.variances, at.cluster, count);
  numbers.variances.assign(variances.begin(), variances.end());
  for (const uint32_t one : part(all.comparable, at.cluster, count)) {
    numbers.comparable.push_back(static_cast<int32_t>(one));
  }
  const double threshold = all.thresholds[at.sequence];
  if (!(threshold < 0)) numbers.threshold = threshold;
  numbers.settled_at = all.settled[at.sequence];
  for (int64_t i = at.pending; i < at.pending + pending; ++i) {
    numbers.pending.push_back({all.pending[2 * i], all.pending[2 * i + 1]});
  }
  return numbers;
}

/// Padding and sinks are attended as such.
bool leaves_outside(const Batch& batch, int64_t sequence, const ClusterNumbers& numbers,
                    int64_t group_tokens) {
  const PaddingMask& validity = batch.validity(sequence);
  for (int64_t token = 0; token < std::ssize(numbers.clusters); ++token) {
    const bool is_outside =
        !validity.came_valid(token) || batch.is_sink(sequence, token / group_tokens);
    if (is_outside && numbers.clusters[token] != kInSinks) return false;
  }
  return true;
}

Status load_layer(EngineContext& context, Batch& batch, int64_t layer, const SavedCounts& counts,
                  const SavedTensors& saved, SavedTables& tables) {
  const EngineOptions& options = context.options;
  SavedLayerOfClusters read;
  KVSWAP_RETURN_IF_ERROR(read_layer(context, layer, counts, saved, read));
  const int64_t tokens = counts.groups * options.group_tokens;
  const ClusterLimits limits = {.tokens = tokens,
                                .room = context.clusters->room(layer),
                                .width = width_of(context),
                                .page_tokens = options.group_tokens,
                                .pages_a_cluster = pages_a_cluster(context.plan.method),
                                .options = context.clusters->options()};
  RowAt at;
  for (; at.sequence < counts.sequences; ++at.sequence) {
    const uint32_t* row_counts = read.all.counts.data() + at.sequence * kCounts;
    if (row_counts[0] > limits.options.clusters_max(limits.room)) {
      return saved.refuse(saved_name(layer, "cluster_counts"), "count the clusters that may be");
    }
    const ClusterNumbers numbers = numbers_of(read, at, tokens, limits.width);
    if (const auto wrong = fault_of(numbers, limits)) {
      return saved.refuse(saved_name(layer, wrong->tensor), wrong->must);
    }
    if (!leaves_outside(batch, at.sequence, numbers, options.group_tokens)) {
      return saved.refuse(saved_name(layer, "clusters"), "leave padding and first tokens out");
    }
    ClusterRow& row = context.clusters->of(layer, at.sequence);
    numbers.restore(row);
    const std::vector<int64_t> ids = cluster_page_ids(row);
    if (std::ssize(ids) != row_counts[2]) {
      return saved.refuse(saved_name(layer, "cluster_counts"), "count each row's pages");
    }
    auto& pages = tables.pages[layer][at.sequence];
    for (const int64_t id : ids) {
      const uint32_t number = read.all.table[at.page++];
      if (number >= counts.records) {
        return saved.refuse(saved_name(layer, "cluster_table"), "name records that are there");
      }
      pages.push_back({id, number});
    }
    at.cluster += row_counts[0];
    at.pending += row_counts[1];
  }
  return Status::ok();
}

}  // namespace

std::vector<int64_t> cluster_page_ids(const ClusterRow& row) {
  std::vector<int64_t> ids;
  for (int64_t cluster = 0; cluster < row.clusters.table().count(); ++cluster) {
    row.pages.each_page(cluster, [&](int64_t slot) { ids.push_back(page_id(slot)); });
  }
  return ids;
}

void list_clusters(EngineContext& context, Batch& batch, int64_t layer,
                   const std::shared_ptr<const std::vector<uint32_t>>& numbers,
                   std::vector<SavedTensor>& tensors) {
  const int64_t tokens = batch.layer(layer).sealed_groups * context.options.group_tokens;
  if (context.clusters_of(layer) == nullptr || tokens == 0) return;
  LayerNumbers all;
  for (int64_t row = 0; row < batch.size(); ++row) add_row(context, layer, row, *numbers, all);
  list_tokens(context, batch.size(), layer, tokens, tensors);
  list_centroids(context, batch.size(), layer, tensors);
  list(layer, "cluster_counts", "U32", std::move(all.counts), kCounts, tensors);
  list(layer, "cluster_thresholds", "F64", std::move(all.thresholds), 1, tensors);
  list(layer, "cluster_settled", "U32", std::move(all.settled), 1, tensors);
  list(layer, "cluster_variances", "F64", std::move(all.variances), 1, tensors);
  list(layer, "cluster_comparable", "U32", std::move(all.comparable), 1, tensors);
  list(layer, "cluster_pending", "I32", std::move(all.pending), 2, tensors);
  list(layer, "cluster_table", "U32", std::move(all.table), 1, tensors);
  list_waiting(context, batch, layer, tensors);
}

Result<int64_t> saved_cluster_room(const EngineContext& context, int64_t layer,
                                   const SavedCounts& counts, const SavedTensors& saved) {
  if (context.clusters_of(layer) == nullptr || counts.groups == 0) return int64_t{0};
  auto read = counts_of(layer, counts, saved);
  if (!read.is_ok()) return read.status();
  const int64_t tokens = counts.groups * context.options.group_tokens;
  const int64_t room = read.value()[kCounts - 1];
  bool is_one = room >= ClusterStore::room_for(tokens) && room == ClusterStore::room_for(room) &&
                room <= ClusterStore::room_for(context.plan.context_max);
  for (int64_t row = 0; row < counts.sequences; ++row) {
    is_one = is_one && read.value()[row * kCounts + kCounts - 1] == room;
  }
  if (!is_one) {
    return saved.refuse(saved_name(layer, "cluster_counts"), "have room for what is sealed");
  }
  return room;
}

Status load_clusters(EngineContext& context, Batch& batch, const SavedCounts& counts,
                     const SavedTensors& saved, SavedTables& tables) {
  if (!context.plan.has_clusters) return Status::ok();
  tables.pages.assign(context.options.layers,
                      std::vector<std::vector<SavedTables::Page>>(counts.sequences));
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    if (context.clusters_of(layer) == nullptr) continue;
    KVSWAP_RETURN_IF_ERROR(load_layer(context, batch, layer, counts, saved, tables));
  }
  return Status::ok();
}

Status load_waiting(EngineContext& context, Batch& batch, int64_t layer,
                    const SavedTensors& saved) {
  if (context.clusters_of(layer) == nullptr) return Status::ok();
  int64_t count = 0;
  for (int64_t row = 0; row < batch.size(); ++row) {
    count += waiting_pages(context.clusters->of(layer, row));
  }
  if (count == 0) return Status::ok();
  auto read = saved.get(saved_name(layer, "cluster_waiting"), saved_dtype(context.options.dtype),
                        saved_page_sizes(context.plan.record_shape, count));
  if (!read.is_ok()) return read.status();
  const int64_t bytes = context.plan.group_bytes;
  const std::byte* page = read.value().data();
  for (int64_t row = 0; row < batch.size(); ++row) {
    const int64_t pages = waiting_pages(context.clusters->of(layer, row));
    for (int64_t index = 0; index < pages; ++index, page += bytes) {
      std::memcpy(batch.pages(row).waiting_page(layer, index), page, bytes);
    }
  }
  return Status::ok();
}

Status verify_clusters(EngineContext& context, Batch& batch, PrefixReader& past, int64_t layer) {
  if (context.clusters_of(layer) == nullptr) return Status::ok();
  auto blocks = past.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const std::shared_ptr<std::byte>& memory = blocks.value().memory;
  const int64_t block = 2 * blocks.value().groups;
  for (int64_t row = 0; row < batch.size(); ++row) {
    const std::vector<int64_t> ids = cluster_page_ids(context.clusters->of(layer, row));
    for (int64_t first = 0; first < std::ssize(ids); first += block) {
      const auto some = std::span(ids).subspan(first, std::min(block, std::ssize(ids) - first));
      KVSWAP_RETURN_IF_ERROR(past.load_stored({layer, row, some}, memory.get(), memory));
    }
  }
  return Status::ok();
}

}  // namespace kvswap
