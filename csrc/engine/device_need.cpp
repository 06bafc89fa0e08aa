#include <algorithm>

#include "engine/device_space.h"
#include "engine/keeping.h"
#include "engine/landing_lanes.h"
#include "engine/memory_need.h"
#include "engine/page_scores.h"
#include "methods/device_selector.h"

namespace kvswap {
namespace {

constexpr int64_t kSegmentLayers = 8;  // whose tables a segment of the ring holds
constexpr int64_t kSegmentBytesMax = 2 << 20;

int64_t padded(int64_t count, int64_t size) { return TableRing::padded(count * size); }

int64_t attention_scratch_bytes(const EngineOptions& options, int64_t batch_max) {
  int64_t most = 0;
  for (int64_t batch = 1; batch <= batch_max / options.heads_apart; ++batch) {
    for (int64_t queries = 1; queries <= options.select_queries_max; ++queries) {
      PagedAttentionArgs args;
      args.batch = batch;
      args.table_heads = options.heads_apart;
      args.heads = options.heads_apart * options.query_heads;
      args.queries = queries;
      args.pages_max = pages_per_layer(options);
      args.shape = options.record_shape();
      args.dtype = options.dtype;
      most = std::max(most, options.device->scratch.paged_attention(args));
    }
  }
  return most;
}

}  // namespace

int64_t outbox_note_bytes(const EngineOptions& options, int64_t record_bytes) {
  return write_buffer_bytes(options, record_bytes) / record_bytes * options.note_bytes();
}

int64_t groups_unit(const EngineOptions& options) {
  return 4 * chunk_rows(options.group_tokens, 1) / options.group_tokens;
}

DeviceRoom device_room(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t groups) {
  DeviceRoom room;
  room.lane_records = batch * options.pages_max;
  room.outbox_bytes = kWriteBuffers * write_buffer_bytes(options, record_bytes);
  if (batch == 0) return room;
  const MethodOptions method = options.method();
  const RowsKind& kind = *RowsKind::find(options.rows);
  const RowLayout layout(kind, method);
  if (has_device_kernels(method)) {
    room.choice = {
        .batch = batch,
        .queries = options.select_queries_max,
        .groups = groups,
        .k = std::min(options.groups_max, options.pages_max),
        .sinks = sink_pages(options) + KeepPlan(options).tokens_max / options.group_tokens,
        .rank = options.ranks.empty()
                    ? kind.shape(method, 0).width
                    : *std::max_element(options.ranks.begin(), options.ranks.end()),
        .heads = options.score_kind() == Score::kSum ? 0 : options.query_heads,
        .differs = KeepPlan(options).shares_groups};
  }
  room.scratch_bytes = attention_scratch_bytes(options, batch);
  room.mass_bytes =
      batch * std::max(Keeping::sequence_bytes(options), PageScores::sequence_bytes(options));
  const int64_t entries = batch * pages_per_layer(options);
  const int64_t attention = padded(entries, sizeof(void*)) + padded(entries, sizeof(uint64_t)) +
                            padded(entries, sizeof(int32_t)) + 2 * padded(batch, sizeof(int32_t)) +
                            padded(entries, page_note_bytes(options));
  const int64_t transfers = std::max(write_buffer_bytes(options, record_bytes) / record_bytes,
                                     batch * tail_pages(options));
  const int64_t packing = padded(transfers, sizeof(void*)) + padded(transfers, sizeof(int64_t)) +
                          3 * padded(transfers, sizeof(int32_t));
  // A chunk of a sequence, or a group of each.
  const DeviceRowsKind* rows = kind.on_device;
  const int64_t sealing = rows == nullptr ? 0
                                          : std::max(rows->table_bytes(layout, 1, groups),
                                                     rows->table_bytes(layout, batch, 1));
  const int64_t landing = padded(room.lane_records, sizeof(void*));
  const int64_t choice = DeviceSelector::table_bytes(layout, room.choice);
  const int64_t largest = std::max({attention, packing, landing, choice, sealing});
  // Each segment that is left is marked on all its streams, and waited for when it is entered
  // again: once in some layers, not once or twice in each. A small budget must not be eaten by it.
  const int64_t of_layers =
      std::min(kSegmentLayers, options.layers) * (attention + packing + landing + choice);
  const int64_t most = options.kv_memory_bytes < 0
                           ? kSegmentBytesMax
                           : std::min(options.kv_memory_bytes / 256, kSegmentBytesMax);
  room.segment_bytes = std::max(largest, std::min(of_layers, most));
  return room;
}

DeviceNeed device_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t groups) {
  const DeviceRoom room = device_room(options, record_bytes, batch, groups);
  const int64_t tables = TableRing::kSegments * room.segment_bytes;
  const int64_t landing = room.lane_records * record_bytes;
  DeviceNeed need;
  const int64_t notes = kWriteBuffers * outbox_note_bytes(options, record_bytes);
  need.device = room.outbox_bytes + notes + landing + tables + room.scratch_bytes + room.mass_bytes;
  need.pinned = LandingLanes::kLanes * landing + tables + notes;
  if (room.choice.batch > 0) {
    const RowLayout layout(*RowsKind::find(options.rows), options.method());
    need.device += DeviceSelector::device_bytes(options.device->scratch, layout, room.choice);
    need.pinned += DeviceSelector::answer_bytes(room.choice);
  }
  return need;
}

}  // namespace kvswap
