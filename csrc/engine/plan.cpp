#include "engine/plan.h"

#include <algorithm>

#include "engine/settings_check.h"
#include "methods/clusters/cluster_store.h"
#include "store/record_store.h"

namespace kvswap {
namespace {

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

std::vector<bool> exact_layers_of(const EngineOptions& options) {
  std::vector<bool> exact(options.layers);
  for (int64_t layer = 0; layer < options.layers; ++layer) exact[layer] = is_exact(options, layer);
  return exact;
}

int64_t sink_pages_of(const EngineOptions& options) {
  if (options.sink_tokens == 0) return 0;
  return (options.sink_tokens + options.group_tokens - 2) / options.group_tokens + 1;
}

int64_t waiting_pages_of(const Plan& plan) {
  if (!plan.has_clusters) return 0;
  const int64_t group_tokens = plan.options.group_tokens;
  return (plan.method.clusters.waiting_max() + 2 * group_tokens - 1) / group_tokens;
}

/// What is packed lands at the end of its page: aligned as it is in the file.
int64_t record_bytes_of(const EngineOptions& options, int64_t stored_bytes) {
  if (options.packing() == nullptr) return stored_bytes;
  const int64_t alignment = std::min<int64_t>(4096, stored_bytes & -stored_bytes);
  return std::max(stored_bytes, round_up(options.page_bytes(), alignment));
}

int64_t write_buffer_bytes_of(const EngineOptions& options, int64_t record_bytes) {
  // Five of them are a twentieth of a budget, and half of that below 6 MiB, where a summary misses
  // each byte. A large budget gains nothing beyond 1 MiB, but on a device, where a prompt's host
  // waits for the disk when three are full. There ten to thirteen of them are charged.
  constexpr int64_t kMost = 1 << 20;
  constexpr int64_t kMostOnDevice = 16 << 20;
  const int64_t budget = options.kv_memory_bytes;
  const int64_t rising = std::max(budget / 192, (budget - (4 << 20)) / 64);
  int64_t wanted =
      budget < 0 ? kMost : std::clamp<int64_t>(std::min(budget / 96, rising), 16 << 10, kMost);
  if (options.device) {
    wanted = budget < 0 ? kMostOnDevice : std::max(wanted, std::min(budget / 256, kMostOnDevice));
  }
  return round_up(std::max(wanted / record_bytes, int64_t{1}) * record_bytes, 4096);
}

int64_t past_block_groups_of(const EngineOptions& options, int64_t record_bytes,
                             int64_t write_buffer_bytes) {
  const int64_t groups = std::max<int64_t>(1, write_buffer_bytes / record_bytes);
  if (!options.device) return groups;
  const int64_t most = std::max((1 << 20) / record_bytes, kPastBlockTokens / options.group_tokens);
  return std::min(groups, most);
}

}  // namespace

int64_t tail_pages(const Settings& settings) {
  const int64_t group_tokens = settings.group_tokens;
  const int64_t step = group_tokens - 1 + settings.select_queries_max;
  // What a step seals stands there until it has joined.
  const int64_t sealed =
      RetentionKind::find(settings.keeper)->retains_online ? step / group_tokens : 0;
  return (settings.tail_tokens + step + group_tokens - 1) / group_tokens + 1 + sealed;
}

Plan::Plan(const EngineOptions& given, int64_t bytes_on_disk)
    : options(given.apart()),
      retention(options),
      exact_layers(exact_layers_of(options)),
      method(options.method()),
      rows(*SummaryKind::find(options.rows)),
      replacement(*parse_replacement(options.replacement)),
      selects(options.selects()),
      keeps_alone(!selects && options.keeper != "none"),
      has_clusters(kvswap::has_clusters(options)),
      has_pools(options.layout == "pools"),
      drops(options.drops()),
      context_max(has_clusters ? ClusterStore::tokens_most(method) : kContextMax),
      chooses_on_device(options.device && has_device_kernels(method)),
      has_float8_records(options.has_float8_records()),
      has_rounded_records(options.records != "model"),
      record_shape(options.record_shape()),
      group_bytes(record_shape.payload_bytes()),
      payload_bytes(options.page_bytes()),
      stored_bytes(bytes_on_disk),
      record_bytes(record_bytes_of(options, stored_bytes)),
      note_bytes(options.note_bytes()),
      token_page_bytes(round_up(group_bytes, 64)),
      sink_pages(sink_pages_of(options)),
      tail_pages(kvswap::tail_pages(options)),
      page_layers(std::min(options.resident_layers.value_or(options.layers), options.layers)),
      shares_pages(page_layers < options.layers),
      waiting_pages(waiting_pages_of(*this)),
      pages_per_layer(options.pages_max + sink_pages + tail_pages + retention.entries +
                      waiting_pages),
      page_note_bytes(has_float8_records || retention.has_float8 ? 2 * record_shape.kv_heads : 0),
      // Its own, and those of the one that it was split from.
      cluster_read_pages(has_clusters ? 2 * pages_a_cluster(method) : 0),
      table_bytes_per_group(RecordStore::table_bytes_per_group() + note_bytes +
                            retention.bytes_per_group),
      write_buffers(drops ? 1 : kWriteBuffers),
      write_buffer_bytes(write_buffer_bytes_of(options, record_bytes)),
      gap_bytes(drops ? 0 : options.merge_gap_bytes),
      past_block_groups(past_block_groups_of(options, record_bytes, write_buffer_bytes)),
      encoded_at_once(
          has_float8_records ? std::max<int64_t>(1, write_buffer_bytes / token_page_bytes) : 0),
      groups_unit(4 * chunk_rows(options.group_tokens, 1) / options.group_tokens) {}

int64_t Plan::sealed_tokens(int64_t context) const {
  return options.sealed_groups(std::min(context, kContextMax)) * options.group_tokens;
}

int64_t Plan::step_attention_bytes(int64_t numbers) const {
  if (numbers == 0) return 0;
  return int64_t{sizeof(float)} *
         (options.query_heads * options.select_queries_max +
          numbers * options.kv_heads * pages_per_layer * options.group_tokens);
}

}  // namespace kvswap
