#include "engine/memory_need.h"

#include <algorithm>
#include <string>

#include "engine/audit.h"
#include "engine/device_space.h"
#include "engine/fetcher.h"
#include "engine/keep_plan.h"
#include "engine/keeping.h"
#include "engine/page_scores.h"
#include "engine/size_product.h"
#include "io/timeline.h"
#include "memory/page_map.h"
#include "methods/cluster_selector.h"
#include "methods/hosted_selector.h"
#include "methods/mass_scorer.h"
#include "methods/product_scorer.h"
#include "methods/rows.h"
#include "store/pool_layout.h"
#include "store/record_store.h"

namespace kvswap {
namespace {

// Of a group that a layer has chosen: its number and its page.
constexpr int64_t kChosenBytes = 2 * sizeof(int32_t);

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

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

/// Keys, pages that are read for a cluster, and a row that grows beside what it grows to.
int64_t clustering_bytes(const EngineOptions& options, int64_t record_bytes, int64_t room) {
  if (!has_clusters(options)) return 0;
  const MethodOptions method = options.method();
  return block_key_bytes(method) + row_key_bytes(method) +
         cluster_read_pages(options) * record_bytes + ClusterRows::row_bytes(method, room);
}

}  // namespace

int64_t sink_pages(const EngineOptions& options) {
  return options.sink_tokens == 0
             ? 0
             : (options.sink_tokens + options.group_tokens - 2) / options.group_tokens + 1;
}

int64_t tail_pages(const EngineOptions& options) {
  const int64_t step = options.group_tokens - 1 + options.select_queries_max;
  // What a step seals stands there until it has joined.
  const int64_t sealed = options.keeper_kind().joins ? step / options.group_tokens : 0;
  return (options.tail_tokens + step + options.group_tokens - 1) / options.group_tokens + 1 +
         sealed;
}

int64_t page_layers(const EngineOptions& options) {
  return std::min(options.resident_layers.value_or(options.layers), options.layers);
}

bool shares_pages(const EngineOptions& options) { return page_layers(options) < options.layers; }

int64_t crop_lenders(const EngineOptions& options) {
  if (options.device) return 0;
  const int64_t tail = tail_pages(options);
  if (!shares_pages(options)) return options.pages_max >= tail ? options.layers : 0;
  return std::min(options.layers, page_layers(options) * options.pages_max / tail);
}

int64_t waiting_pages(const EngineOptions& options) {
  if (!has_clusters(options)) return 0;
  const int64_t group_tokens = options.group_tokens;
  const int64_t waiting = options.method().clusters.waiting_max();
  return (waiting + 2 * group_tokens - 1) / group_tokens;
}

int64_t pages_per_layer(const EngineOptions& options) {
  return options.pages_max + sink_pages(options) + tail_pages(options) + KeepPlan(options).entries +
         waiting_pages(options);
}

int64_t cluster_read_pages(const EngineOptions& options) {
  // Its own, and those of the one that it was split from.
  return 2 * pages_a_cluster(options.method());
}

int64_t cluster_rows_at_once(const EngineOptions& options) {
  // No block of a prompt has its keys in memory meanwhile.
  const MethodOptions method = options.method();
  const int64_t ahead = method.group_tokens * method.kv_heads * method.head_dim;
  const int64_t each = row_key_bytes(method) + ahead * int64_t{sizeof(float)};
  return std::max<int64_t>(1, block_key_bytes(method) / each);
}

int64_t cluster_bytes(const EngineOptions& options, int64_t room) {
  const MethodOptions method = options.method();
  const int64_t clusters = method.clusters.clusters_max(room);
  const int64_t slots = clusters * pages_a_cluster(method);
  const int64_t pools = options.layout == "pools" ? clusters * PoolLayout::bytes_per_pool() : 0;
  return ClusterRows::row_bytes(method, room) + slots * RecordTables::bytes_per_group() + pools +
         ClusterRows::pages_max(method, room) * int64_t{sizeof(RecordList::Record)};
}

int64_t cluster_pages_on_disk(const EngineOptions& options, int64_t tokens) {
  const MethodOptions method = options.method();
  if (options.layout != "pools") return ClusterRows::pages_max(method, tokens);
  // Each pool holds a page of a cluster, or is about to.
  const int64_t pools = method.clusters.clusters_max(ClusterRows::room_for(tokens)) + 1;
  return pools * pool_options(options).pool_pages(pages_a_cluster(method));
}

int64_t token_page_bytes(const EngineOptions& options, int64_t record_bytes) {
  return options.has_float8_records() ? round_up(options.group_bytes(), 64) : record_bytes;
}

int64_t page_note_bytes(const EngineOptions& options) {
  const bool has_float8 = options.has_float8_records() || KeepPlan(options).has_float8;
  return has_float8 ? 2 * options.record_shape().kv_heads : 0;
}

int64_t table_bytes_per_group(const EngineOptions& options) {
  return RecordStore::table_bytes_per_group() + options.note_bytes() +
         Keeping::bytes_per_group(options);
}

int64_t write_buffers(const EngineOptions& options) { return options.drops() ? 1 : kWriteBuffers; }

int64_t gap_bytes(const EngineOptions& options) {
  return options.drops() ? 0 : options.merge_gap_bytes;
}

int64_t write_buffer_bytes(const EngineOptions& options, int64_t record_bytes) {
  // A small budget must not be eaten by staging; a large one gains nothing beyond 1 MiB.
  const int64_t wanted = options.kv_memory_bytes < 0
                             ? 1 << 20
                             : std::clamp<int64_t>(options.kv_memory_bytes / 96, 64 << 10, 1 << 20);
  return round_up(std::max(wanted / record_bytes, int64_t{1}) * record_bytes, 4096);
}

int64_t past_block_groups(const EngineOptions& options, int64_t record_bytes) {
  return std::max<int64_t>(1, write_buffer_bytes(options, record_bytes) / record_bytes);
}

int64_t encoded_at_once(const EngineOptions& options, int64_t record_bytes) {
  if (!options.has_float8_records()) return 0;
  return std::max<int64_t>(
      1, write_buffer_bytes(options, record_bytes) / token_page_bytes(options, record_bytes));
}

int64_t records_held(const EngineOptions& options, int64_t batch, int64_t context) {
  if (!options.drops()) return 0;
  const int64_t sealed = options.sealed_groups(std::min(context, kContextMax));
  // Of a layer the whole prompt; of the others what a crop may ask for, and the next turn.
  const int64_t waiting =
      (options.positions_to_crop() + options.keep_interval) / options.group_tokens + 2;
  return size_product({batch, sealed + size_product({options.layers, std::min(sealed, waiting)})});
}

int64_t score_bytes(const EngineOptions& options, int64_t batch, int64_t groups) {
  const int64_t kept = Keeping::turn_bytes(options, std::min(groups, kContextMax));
  if (has_clusters(options)) {
    const MethodOptions method = options.method();
    const int64_t room =
        ClusterRows::room_for(std::min(groups, kContextMax) * options.group_tokens);
    return ClusterSelector::scratch_bytes(method, batch, method.clusters.clusters_max(room));
  }
  if (!options.selects() || (options.device && has_device_kernels(options.method()))) return kept;
  // What is given stands beside what is chosen from: of a layer, and of the one predicted next.
  const int64_t copies = RowsKind::find(options.rows)->is_given ? 3 : 1;
  const int64_t scores = kept + size_product({batch, options.select_queries_max, groups, copies,
                                              int64_t{sizeof(float)}});
  if (groups == 0) return scores;
  const int64_t asked_heads = options.score_kind() == Score::kMax ? options.query_heads : 1;
  if (!RowsKind::find(options.rows)->takes_projections) {
    const int64_t width = RowsKind::find(options.rows)->shape(options.method(), 0).width;
    return scores + size_product({batch, options.select_queries_max, asked_heads, width,
                                  int64_t{sizeof(float)}});
  }
  const int64_t rank = *std::max_element(options.ranks.begin(), options.ranks.end());
  const int64_t vectors = size_product({batch, options.select_queries_max, asked_heads});
  const int64_t staged =
      options.score_columns ? ProductScorer::scratch_bytes(vectors, rank) : int64_t{0};
  if (options.score_kind() == Score::kSum) return scores + staged;
  const int64_t projected = size_product(
      {batch, options.select_queries_max, options.query_heads, rank, int64_t{sizeof(float)}});
  if (options.score_kind() == Score::kMax) return scores + staged + projected;
  return scores + projected +
         MassScorer::scratch_bytes(options.query_heads, rank, std::min(groups, kContextMax),
                                   options.group_tokens);
}

MemoryNeed memory_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t context) {
  batch = std::min(batch, kTooManyBytes);
  context = std::min(context, kTooManyBytes);
  const EngineOptions inner = options.apart();
  if (inner.heads_apart != options.heads_apart) {
    return memory_need(inner, record_bytes, size_product({batch, inner.heads_apart}), context);
  }
  const int64_t groups = (context + options.group_tokens - 1) / options.group_tokens;
  const int64_t width = options.heads_apart * options.kv_heads * options.head_dim;
  const int64_t partitions = size_product({options.layers, batch});
  MemoryNeed need;
  const int64_t page_bytes = token_page_bytes(options, record_bytes);
  const int64_t buffers = size_product({page_layers(options), batch});
  need.pages =
      size_product({buffers, options.pages_max, record_bytes}) +
      size_product({partitions, sink_pages(options) + tail_pages(options) + waiting_pages(options),
                    page_bytes});
  need.kept = size_product({partitions, Keeping::bytes_per_layer(options, page_bytes)});
  const int64_t summarised =
      options.sealed_groups(std::min(context, kContextMax)) * options.group_tokens;
  const MethodOptions method = options.method();
  const RowsKind& kind = *RowsKind::find(options.rows);
  int64_t moving = 0;
  const int64_t room = ClusterRows::room_for(summarised);
  for (int64_t layer = 0; has_clusters(options) && layer < options.layers; ++layer) {
    if (options.is_exact(layer)) continue;
    const int64_t bytes = size_product({batch, cluster_bytes(options, room)});
    need.summary = std::min(need.summary + bytes, kTooManyBytes);
  }
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const RowShape rows = kind.shape(method, layer);
    if (options.is_exact(layer) || rows.width == 0) continue;
    const Summary::Shape shape = {rows.width, chunk_rows(options.group_tokens, rows.tokens_per_row),
                                  options.summary_type()};
    const int64_t bytes = size_product({batch, shape.bytes(summarised / rows.tokens_per_row)});
    need.summary = std::min(need.summary + bytes, kTooManyBytes);
    moving = std::max(moving, shape.moving_bytes());
    if (kind.takes_projections) {
      need.projections +=
          2 * width * rows.width * dtype_bytes(projection_dtype(options.summary_type()));
    }
  }
  need.tables = size_product({partitions, groups, table_bytes_per_group(options)}) +
                size_product({buffers, options.pages_max,
                              PageMap::bytes_per_page(options.replacement_policy())}) +
                size_product({buffers, options.pages_max, Fetch::bytes_per_load()}) +
                size_product({partitions, options.pages_max, kChosenBytes}) +
                size_product({batch, (context + 63) / 64, 8});
  // Blocks of the past, and what they are unpacked to.
  const int64_t block = past_block_groups(options, record_bytes);
  need.staging = write_buffers(options) * write_buffer_bytes(options, record_bytes) +
                 size_product({records_held(options, batch, context), record_bytes}) +
                 gap_bytes(options) + 2 * block * record_bytes + 2 * block * page_bytes +
                 encoded_at_once(options, record_bytes) * page_bytes + moving +
                 clustering_bytes(options, record_bytes, room) +
                 Audit::fixed_bytes(options, record_bytes) +
                 Keeping::fixed_bytes(options, record_bytes);
  // crop() into sealed groups reads all layers before it changes one; see Editor::make_room().
  const int64_t crop_layers = std::max<int64_t>(1, options.layers - crop_lenders(options));
  need.scratch = score_bytes(options, batch, groups) +
                 size_product({batch, pages_per_layer(options), 20 + page_note_bytes(options)}) +
                 size_product({batch, Audit::sequence_bytes(options)}) +
                 size_product({batch, Keeping::sequence_bytes(options)}) +
                 size_product({batch, PageScores::sequence_bytes(options)}) +
                 size_product({crop_layers, batch, tail_pages(options), record_bytes});
  need.timeline = Timeline::bytes(options.timeline_spans);
  // What a device needs beside is a small part of such sizes, and would not change the answer.
  if (options.device && need.total() < kTooManyBytes) {
    const DeviceNeed beside =
        device_need(options, record_bytes, batch, round_up(groups, groups_unit(options)));
    need.device = beside.device;
    need.pinned = beside.pinned;
    if (!has_device_kernels(method)) {
      need.staging += HostedSelector::key_bytes(method);
      need.scratch += batch * HostedSelector::query_bytes(method, options.select_queries_max);
    }
  }
  return need;
}

int64_t least_budget(EngineOptions options, int64_t record_bytes, int64_t batch, int64_t context) {
  // Buffers grow by less than what the budget does, so that this ends, at the least from below.
  int64_t least = 0;
  do {
    options.kv_memory_bytes = least;
    least = memory_need(options, record_bytes, batch, context).total();
  } while (least != options.kv_memory_bytes);
  return least;
}

}  // namespace kvswap
