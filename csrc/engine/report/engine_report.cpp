#include "engine/report/engine_report.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/report/chrome_trace.h"
#include "kernels/cpu_features.h"

namespace kvswap {
namespace {

/// Of each sequence.
double tokens_retained_in(const Engine& engine, int64_t layer) {
  const Batch& batch = engine.sequences();
  int64_t retained = 0;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence)
    retained += batch.pages(sequence).retained(layer).count();
  return static_cast<double>(retained) / static_cast<double>(std::max<int64_t>(1, batch.size()));
}

/// Tokens of each sequence that are kept in a layer, and that are dropped, on average.
void add_retained(const Engine& engine, std::map<std::string, double>& counters) {
  const EngineOptions& options = engine.context().options;
  if (engine.context().plan.keeps_alone) {
    counters["tokens_dropped"] = tokens_dropped(engine);
  }
  if (engine.context().retention.pages == 0) return;
  counters["turns"] = static_cast<double>(engine.context().counters.refreshes);
  counters["turn_seconds"] = engine.context().counters.refresh_seconds;
  counters["turn_bytes_read"] = static_cast<double>(engine.context().counters.refresh_bytes_read);
  counters["groups_recalled"] = static_cast<double>(engine.context().counters.groups_recalled);
  counters["tokens_kept"] = tokens_retained(engine);
  for (int64_t layer = 0; engine.context().retention.has_layer_budgets && layer < options.layers;
       ++layer) {
    counters["tokens_kept_" + std::to_string(layer)] = tokens_retained_in(engine, layer);
  }
  if (!engine.context().retention.has_float8) return;
  counters["tokens_kept_fp8"] = tokens_retained(engine, RetainedAs::kFloat8);
}

/// Of all layers and context: how many clusters there are, and what splitting and packing them
/// took.
void add_clusters(const Engine& engine, std::map<std::string, double>& counters) {
  const EngineContext& context = engine.context();
  if (context.clusters == nullptr) return;
  int64_t clusters = 0;
  int64_t tokens = 0;
  int64_t filled_slots = 0;
  int64_t waiting = 0;
  int64_t rows = 0;
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    if (!context.clusters->has(layer)) continue;
    for (int64_t sequence = 0; sequence < engine.sequences().size(); ++sequence, ++rows) {
      const auto& [row, pages] = context.clusters->of(layer, sequence);
      clusters += row.table().numbers().used();
      for (const int32_t size : row.table().size()) tokens += size;
      waiting += std::ssize(pages.waiting());
      for (int64_t cluster = 0; cluster < row.table().count(); ++cluster) {
        filled_slots += pages.pages(cluster);
      }
    }
  }
  const auto each = [](int64_t count, int64_t of) {
    return static_cast<double>(count) / static_cast<double>(std::max<int64_t>(1, of));
  };
  counters["clusters"] = each(clusters, rows);
  counters["tokens_a_cluster"] = each(tokens, clusters);
  counters["pages_a_cluster"] = each(filled_slots, clusters);
  counters["tokens_waiting"] = each(waiting, rows);
  counters["cluster_splits"] = static_cast<double>(context.counters.cluster_splits);
  counters["cluster_splits_refused"] = static_cast<double>(context.counters.cluster_splits_refused);
  counters["cluster_splits_forced"] = static_cast<double>(context.counters.cluster_splits_forced);
  counters["cluster_records_sealed"] = static_cast<double>(context.counters.cluster_records_sealed);
  counters["cluster_records_read"] = static_cast<double>(context.counters.cluster_records_read);
  counters["cluster_seconds"] = context.counters.cluster_seconds;
  counters["bytes_a_read"] = counters["bytes_read"] / std::max(1.0, counters["reads"]);
}

/// What predictions have led to, in all and by layer.
void add_prefetch(const Engine& engine, std::map<std::string, double>& counters) {
  const EngineContext& context = engine.context();
  if (context.look_ahead != LookAheadMode::kVerify) return;
  const auto add = [&](const std::string& layer, const AdaptivePrefetch::Counts& counts) {
    counters["prefetch_hits" + layer] = static_cast<double>(counts.hits);
    counters["prefetch_wasted" + layer] = static_cast<double>(counts.wasted);
    counters["prefetch_dropped" + layer] = static_cast<double>(counts.dropped);
  };
  add("", context.adaptive_prefetch.total());
  counters["groups_prefetched"] = static_cast<double>(context.counters.groups_prefetched);
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    const std::string name = std::string("_").append(std::to_string(layer));
    add(name, context.adaptive_prefetch.counts(layer));
    counters["predicts" + name] = context.adaptive_prefetch.predicts(layer) ? 1 : 0;
  }
}

/// settings' word; where verify is off, why.
std::string look_ahead_fact(const EngineOptions& options) {
  const std::string why = why_no_prefetch(options);
  return why.empty() ? options.look_ahead : "off: " + why;
}

/// Half of the 95 % interval of a mean with that variance.
double half_interval(double variance) { return 1.96 * std::sqrt(variance); }

/// By layer and in all: the mean over layers that were looked at, each with half of its 95 %
/// interval.
void add_missed_mass(const Engine& engine, std::map<std::string, double>& counters) {
  const EngineOptions& options = engine.options();
  if (options.steps_between_looks() == 0) return;
  const AdaptiveTopK& counts = engine.context().group_counts;
  for (int64_t layer = 0; options.missed_mass_max && layer < options.layers; ++layer) {
    counters["groups_now_" + std::to_string(layer)] = static_cast<double>(counts.of(layer));
  }
  if (options.missed_mass_max) counters["missed_mass_excess"] = counts.excess();
  const std::vector<MissedMass>& layers = engine.audit().layers();
  double looked = 0;
  double sum = 0;
  double variance = 0;
  double looks = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const MissedMass& missed = layers[layer];
    if (missed.looks == 0) continue;
    counters["missed_mass_" + std::to_string(layer)] = missed.mean();
    counters["missed_mass_error_" + std::to_string(layer)] = half_interval(missed.variance());
    ++looked;
    looks += static_cast<double>(missed.looks);
    sum += missed.mean();
    variance += missed.variance();
  }
  counters["audits"] = looks;
  if (looked == 0) return;
  counters["missed_mass"] = sum / looked;
  counters["missed_mass_error"] = half_interval(variance) / looked;
}

}  // namespace

double tokens_retained(const Engine& engine, RetainedAs precision) {
  const Batch& batch = engine.sequences();
  const int64_t layers = engine.options().layers;
  size_t retained = 0;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      const RetainedTokens& tokens = batch.pages(sequence).retained(layer);
      retained += tokens.float8().size();
      if (precision == RetainedAs::kAny) retained += tokens.positions().size();
    }
  }
  return static_cast<double>(retained) /
         static_cast<double>(std::max<int64_t>(1, batch.size() * layers));
}

double tokens_dropped(const Engine& engine) {
  const Batch& batch = engine.sequences();
  const EngineOptions& options = engine.options();
  int64_t dropped = 0;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    if (engine.context().plan.selects || engine.context().plan.is_exact(layer)) continue;
    for (int64_t sequence = 0; sequence < batch.size(); ++sequence)
      dropped += batch.tokens_apart(layer, sequence);
  }
  const int64_t each = std::max<int64_t>(1, batch.size() * options.layers);
  return static_cast<double>(dropped) / static_cast<double>(each);
}

std::map<std::string, double> engine_counters(const Engine& engine) {
  const EngineCounters& steps = engine.context().counters;
  const FetchCounters& reads = engine.context().fetcher->counters();
  const ReaderCounters reader = engine.context().fetcher->reader().counters();
  const SpaceCounters space = engine.context().space->counters();
  const auto number = [](auto count) { return static_cast<double>(count); };
  const double is_on_disk = engine.context().plan.drops ? 0 : 1;
  std::map<std::string, double> counters = {
      {"steps", number(steps.steps)},
      {"sequences", number(steps.sequences)},
      {"groups_attended", number(steps.groups_attended)},
      {"groups_loaded", number(steps.groups_loaded)},
      {"records_sealed", number(steps.records_sealed)},
      {"select_seconds", steps.select_seconds},
      {"plan_seconds", number(steps.plan_seconds)},
      {"attend_seconds", number(steps.attend_seconds)},
      {"append_seconds", number(steps.append_seconds)},
      {"bytes_read", number(reader.bytes)},
      {"bytes_read_payload", number(reads.payload_bytes)},
      {"bytes_read_gaps", number(reads.gap_bytes)},
      {"records_read", number(reads.records)},
      {"records_reread", number(reads.reread_records)},
      {"reads", number(reader.reads)},
      {"read_retries", number(reader.retries)},
      {"read_calls", number(reader.calls)},
      {"wait_seconds", number(reads.wait_seconds)},
      {"hidden_seconds", number(reads.hidden_seconds)},
      {"bytes_written",
       is_on_disk * number(engine.context().store->writes().queue().bytes_written())},
      {"write_blocked_seconds", number(engine.context().store->writes().queue().blocked_seconds())},
      {"bytes_on_disk", is_on_disk * number(engine.context().store->bytes_held())},
      {"bytes_allocated_on_disk", is_on_disk * number(engine.context().file->allocated_bytes())},
      {"record_bytes", number(engine.context().stored_bytes())},
      {"device_bytes", number(engine.context().space->device_bytes())},
      {"pinned_bytes", number(engine.context().space->pinned_bytes())},
      {"copied_bytes", number(space.copied_bytes)},
      {"copy_seconds", space.copy_seconds},
      {"device_wait_seconds", space.device_wait_seconds},
      {"choice_wait_seconds", engine.context().selector->wait_seconds()},
  };
  if (engine.context().plan.drops) {
    counters["bytes_allocated"] = number(engine.context().file->allocated_bytes());
  }
  if (engine.context().plan.shares_pages) {
    counters["groups_read_again"] = number(steps.groups_reloaded);
  }
  add_prefetch(engine, counters);
  add_retained(engine, counters);
  add_missed_mass(engine, counters);
  add_clusters(engine, counters);
  return counters;
}

std::map<std::string, std::string> engine_facts(const Engine& engine) {
  std::string fallbacks;
  for (const std::string& fallback : engine.context().fallbacks) {
    fallbacks += (fallbacks.empty() ? "" : "\n") + fallback;
  }
  return {{"reader", engine.context().fetcher->reader().name()},
          {"io_mode", engine.context().plan.drops          ? "none"
                      : engine.context().file->is_direct() ? "direct"
                                                           : "buffered"},
          {"simd", simd_level()},
          {"device", engine.context().space->name()},
          {"look_ahead", look_ahead_fact(engine.options())},
          {"fallbacks", fallbacks}};
}

std::map<std::string, int64_t> engine_ledger(const Engine& engine) {
  const Ledger& ledger = engine.context().ledger;
  std::map<std::string, int64_t> bytes;
  for (int use = 0; use < kUses; ++use) {
    bytes[use_name(static_cast<Use>(use))] = ledger.used(static_cast<Use>(use));
  }
  // Charged, since any cache that shares it may be the last; but one alone shows it in its total.
  const int64_t shared = engine.context().selector->summaries().shared_bytes();
  bytes[use_name(Use::kSummary)] -= shared;
  bytes["shared"] = shared;
  bytes["total"] = ledger.total() - shared;
  bytes["peak"] = ledger.peak();
  bytes["limit"] = ledger.limit_bytes();
  return bytes;
}

Status engine_timeline(const Engine& engine, std::string& trace) {
  if (engine.context().timeline == nullptr) {
    return Status::invalid(
        "timeline: must be recorded, got a session with timeline_spans 0; open it with as many as "
        "are to be kept, such as 16384");
  }
  trace = chrome_trace(*engine.context().timeline);
  return Status::ok();
}

}  // namespace kvswap
