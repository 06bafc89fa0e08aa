#include "engine/memory/memory_reservations.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>

#include "engine/backend/device_backend.h"
#include "engine/sequence/batch.h"
#include "methods/clusters/cluster_selector.h"
#include "methods/selection/attention_mass_scorer.h"
#include "methods/selection/logit_scorer.h"
#include "store/paired_pool_layout.h"

namespace kvswap {
namespace {

/// Each by its name; those that few have where there is something of it.
std::string uses_of(const Arena& arena, bool has_device) {
  std::string text;
  for (const Use use :
       {Use::kPages, Use::kRetained, Use::kSummary, Use::kTables, Use::kStaging, Use::kProjections,
        Use::kScratch, Use::kTimeline, Use::kDevice, Use::kPinned}) {
    const bool is_devices = use == Use::kDevice || use == Use::kPinned;
    const bool is_rare = use == Use::kRetained || use == Use::kTimeline;
    if (is_devices ? !has_device : is_rare && arena.of(use) == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(use_name(use)) + " " +
            std::to_string(arena.of(use));
  }
  return text;
}

/// Of the clusters of a layer and sequence with room for so many tokens, and of the tables of their
/// pages.
int64_t cluster_bytes(const Plan& plan, int64_t room) {
  const int64_t clusters = plan.method.clusters.clusters_max(room);
  const int64_t slots = clusters * pages_a_cluster(plan.method);
  const int64_t pools = plan.has_pools ? clusters * PairedPoolLayout::bytes_per_pool() : 0;
  return ClusterStore::row_bytes(plan.method, room) + slots * RecordTables::bytes_per_group() +
         pools +
         ClusterStore::pages_max(plan.method, room) * int64_t{sizeof(RecordRegistry::Record)};
}

/// On disk, of so many tokens of a layer and sequence at most, free pages of pools among them.
int64_t cluster_pages_on_disk(const Plan& plan, int64_t tokens) {
  if (!plan.has_clusters) return 0;
  if (!plan.has_pools) return ClusterStore::pages_max(plan.method, tokens);
  // Each pool holds a page of a cluster, or is about to.
  const int64_t pools = plan.method.clusters.clusters_max(ClusterStore::room_for(tokens)) + 1;
  return pools * pool_options(plan.options).pool_pages(pages_a_cluster(plan.method));
}

/// Records that stand in memory at once where nothing is on disk.
int64_t records_held(const Plan& plan, const Extent& extent) {
  if (!plan.drops) return 0;
  const EngineOptions& options = plan.options;
  const int64_t sealed = plan.sealed_tokens(extent.context) / options.group_tokens;
  // Of a layer the whole prompt; of the others what a crop may ask for, and the next refresh.
  const int64_t waiting =
      (options.positions_to_crop() + options.keep_interval) / options.group_tokens + 2;
  return size_product(
      {extent.batch, sealed + size_product({options.layers, std::min(sealed, waiting)})});
}

/// Scores of a choice among `groups` of each sequence, where the CPU makes it, and of a refresh.
int64_t score_bytes(const Plan& plan, int64_t batch, int64_t groups) {
  const EngineOptions& options = plan.options;
  const MethodOptions& method = plan.method;
  const int64_t retained =
      plan.retention.refresh_bytes(std::min(groups, kContextMax), options.group_tokens);
  if (plan.has_clusters) {
    const int64_t room =
        ClusterStore::room_for(std::min(groups, kContextMax) * options.group_tokens);
    return ClusterSelector::scratch_bytes(method, batch, method.clusters.clusters_max(room));
  }
  if (!plan.selects || plan.chooses_on_device) return retained;
  // What is given stands beside what is chosen from: of a layer, and of the one predicted next.
  const int64_t copies = plan.rows.is_given ? 3 : 1;
  const int64_t scores = retained + size_product({batch, options.select_queries_max, groups, copies,
                                                  int64_t{sizeof(float)}});
  if (groups == 0) return scores;
  const int64_t asked_heads = method.score == Score::kMax ? options.query_heads : 1;
  if (!plan.rows.takes_projections) {
    const int64_t width = plan.rows.shape(method, 0).width;
    return scores + size_product({batch, options.select_queries_max, asked_heads, width,
                                  int64_t{sizeof(float)}});
  }
  const int64_t rank = *std::max_element(options.ranks.begin(), options.ranks.end());
  const int64_t vectors = size_product({batch, options.select_queries_max, asked_heads});
  const int64_t staged =
      options.score_columns ? LogitScorer::scratch_bytes(vectors, rank) : int64_t{0};
  if (method.score == Score::kSum) return scores + staged;
  const int64_t projected = size_product(
      {batch, options.select_queries_max, options.query_heads, rank, int64_t{sizeof(float)}});
  if (method.score == Score::kMax) return scores + staged + projected;
  return scores + projected +
         MassScorer::scratch_bytes(options.query_heads, rank, std::min(groups, kContextMax),
                                   options.group_tokens);
}

/// Of a layer, in both directions.
int64_t projection_bytes(const Plan& plan, int64_t layer) {
  const EngineOptions& options = plan.options;
  if (!plan.rows.takes_projections || plan.is_exact(layer)) return 0;
  const int64_t width = options.heads_apart * options.kv_heads * options.head_dim;
  return 2 * width * options.ranks[layer] *
         dtype_bytes(projection_dtype(plan.method.summary_dtype));
}

}  // namespace

int64_t least_budget(const Plan& plan, const Extent& extent, NeedOf need) {
  // Buffers grow by less than what the budget does, so that this ends, at the least from below.
  EngineOptions options = plan.options;
  int64_t least = 0;
  do {
    options.kv_memory_bytes = least;
    least = need(Plan(options, plan.stored_bytes), extent).total();
  } while (least != options.kv_memory_bytes);
  return least;
}

MemoryReservations::MemoryReservations(EngineContext& context, NeedOf need)
    : context_(context),
      need_(need),
      fixed_(need(context.plan, {}).only({Use::kStaging, Use::kDevice, Use::kPinned})),
      sequence_(need(context.plan, {.batch = 1})
                    .only({Use::kPages, Use::kRetained, Use::kTables, Use::kScratch})) {}

void MemoryReservations::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  const EngineOptions& options = plan.options;
  const int64_t sealed = plan.sealed_tokens(extent.context);
  const int64_t room = plan.has_clusters ? ClusterStore::room_for(sealed) : 0;
  int64_t moving = 0;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    if (plan.is_exact(layer)) continue;
    if (plan.has_clusters) {
      arena.take(Use::kSummary, size_product({extent.batch, cluster_bytes(plan, room)}));
    }
    const SummaryShape rows = plan.rows.shape(plan.method, layer);
    if (rows.width == 0) continue;
    const KeySummary::Shape shape = {rows.width,
                                     chunk_rows(options.group_tokens, rows.tokens_per_row),
                                     plan.method.summary_dtype};
    arena.take(Use::kSummary,
               size_product({extent.batch, shape.bytes(sealed / rows.tokens_per_row)}));
    moving = std::max(moving, shape.moving_bytes());
    arena.take(Use::kProjections, projection_bytes(plan, layer));
  }
  const int64_t groups = (extent.context + options.group_tokens - 1) / options.group_tokens;
  arena.take(Use::kTables,
             size_product({options.layers, extent.batch, groups, plan.table_bytes_per_group}));
  arena.take(Use::kStaging, moving);
  arena.take(Use::kStaging, size_product({records_held(plan, extent), plan.stored_bytes}));
  arena.take(Use::kScratch, score_bytes(plan, extent.batch, groups));
}

Status MemoryReservations::charge_fixed() {
  return context_.ledger.charge(fixed_, "the staging buffers of writes and long chunks");
}

Status MemoryReservations::check_room(const Extent& extent) const {
  const EngineOptions& options = context_.options;
  const std::string of = " for a batch of " + std::to_string(extent.batch / options.heads_apart) +
                         " and a context of " + std::to_string(extent.context) + " tokens";
  const Arena need = need_(context_.plan, extent);
  if (options.kv_memory_bytes >= 0 && need.total() > options.kv_memory_bytes) {
    EngineOptions enough = options;
    enough.kv_memory_bytes = least_budget(context_.plan, extent, need_);
    const Arena least = need_(Plan(enough, context_.stored_bytes()), extent);
    return Status::budget("session: kv_memory_bytes must be at least " +
                          std::to_string(enough.kv_memory_bytes) + of + " (" +
                          uses_of(least, options.device.has_value()) + "), got " +
                          std::to_string(options.kv_memory_bytes) + "; raise it, or lower " +
                          (need.of(Use::kRetained) > 0 ? "retention.tokens, " : "") +
                          "memory.pages_per_layer, summary.rank, the context or the batch");
  }
  return context_.plan.drops ? Status::ok() : check_disk(extent, of);
}

Status MemoryReservations::check_disk(const Extent& extent, const std::string& of) const {
  const EngineOptions& options = context_.options;
  const int64_t saved_groups = options.base != nullptr ? options.base->groups : 0;
  const int64_t new_groups =
      std::max<int64_t>(0, options.sealed_groups(extent.context) - saved_groups);
  int64_t disk_bytes = options.layers;
  const int64_t pages = cluster_pages_on_disk(context_.plan, extent.context);
  for (const int64_t factor : {extent.batch, new_groups + pages, context_.stored_bytes()}) {
    if (__builtin_mul_overflow(disk_bytes, factor, &disk_bytes)) {
      disk_bytes = std::numeric_limits<int64_t>::max();
      break;
    }
  }
  if (options.disk_quota_bytes && disk_bytes > *options.disk_quota_bytes) {
    return Status::budget("session: storage.max_disk_bytes must be at least " +
                          std::to_string(disk_bytes) + of + ", got " +
                          std::to_string(*options.disk_quota_bytes));
  }
  const auto free = free_bytes(options.directory);
  if (!free.is_ok()) return free.status();
  const int64_t available = free.value() + context_.file->allocated_bytes();
  if (disk_bytes > available) {
    return Status::storage(
        "session: " + options.directory + " must have " + std::to_string(disk_bytes) +
            " bytes free for a context of " + std::to_string(extent.context) + " tokens, got " +
            std::to_string(available) + "; free some, choose another path, or lower max_context",
        ENOSPC, options.directory);
  }
  return Status::ok();
}

Status MemoryReservations::reserve(int64_t batch, int64_t groups) {
  if (!context_.options.device) return Status::ok();
  const int64_t unit = context_.plan.groups_unit;
  batch = std::max(batch, reserved_batch_);
  groups = std::max((groups + unit - 1) / unit * unit, reserved_groups_);
  if (batch == reserved_batch_ && groups == reserved_groups_) return Status::ok();
  Arena need;
  DeviceBackend::reserve(need, context_.plan, batch, groups);
  Arena more;
  for (const Use use : {Use::kDevice, Use::kPinned}) {
    more.take(use, need.of(use) - context_.ledger.used(use));
  }
  const std::string what = "what " + std::to_string(batch / context_.options.heads_apart) +
                           " sequences of " + std::to_string(groups) +
                           " groups need beside their pages";
  KVSWAP_RETURN_IF_ERROR(context_.ledger.check(more.total(), what));
  Status reserved = take_place(batch, groups);
  if (!reserved.is_ok()) {
    // What stood there was given up for it, and is taken again.
    const bool is_back =
        reserved_batch_ == 0 || take_place(reserved_batch_, reserved_groups_).is_ok();
    if (!is_back) context_.broken = reserved;
    return reserved;
  }
  context_.broken = Status::ok();  // there was room at the second try
  reserved_batch_ = batch;
  reserved_groups_ = groups;
  return context_.ledger.charge(more, what);
}

Status MemoryReservations::take_place(int64_t batch, int64_t groups) {
  KVSWAP_RETURN_IF_ERROR(context_.space->reserve(batch, groups));
  return context_.selector->reserve(context_.space->selection_place());
}

/// And the scores of a choice among so many groups of each sequence.
Status MemoryReservations::charge_scored(Arena arena, int64_t sequences, int64_t groups,
                                         const std::string& what) {
  const int64_t more =
      std::max<int64_t>(0, score_bytes(context_.plan, sequences, groups) - scored_bytes_);
  arena.take(Use::kScratch, more);
  KVSWAP_RETURN_IF_ERROR(context_.ledger.charge(arena, what));
  scored_bytes_ += more;
  return Status::ok();
}

Status MemoryReservations::charge_growth(Batch& batch, int64_t layer, int64_t positions) {
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t charged = batch.due_groups(layer, batch.layer(layer).positions);
  const int64_t due = batch.due_groups(layer, positions);
  if (due == charged) return Status::ok();
  const int64_t summary_bytes =
      context_.selector->summaries().bytes_to_append(layer, due * group_tokens) -
      context_.selector->summaries().bytes_to_append(layer, charged * group_tokens);
  const int64_t groups = batch.layer(layer).sealed_groups + due;
  ClusterStore* clusters = context_.clusters_of(layer);
  int64_t clustered = 0;
  if (clusters != nullptr) {
    const int64_t room =
        std::max(clusters->room(layer), ClusterStore::room_for(groups * group_tokens));
    clustered = clusters->sequences() * (cluster_bytes(context_.plan, room) -
                                         cluster_bytes(context_.plan, clusters->room(layer)));
  }
  Arena more;
  more.take(Use::kTables, batch.size() * (due - charged) * context_.plan.table_bytes_per_group);
  const std::string what = "a context of " + std::to_string(positions) + " tokens";
  if (context_.plan.drops) {
    more.take(Use::kStaging, batch.size() * (due - charged) * context_.stored_bytes());
  }
  more.take(Use::kSummary, summary_bytes + clustered);
  if (!reserve(batch.size(), groups).is_ok()) batch.spares().release(0);
  KVSWAP_RETURN_IF_ERROR(reserve(batch.size(), groups));
  if (!charge_scored(more, batch.size(), groups, what).is_ok()) {
    batch.spares().release(0);
    KVSWAP_RETURN_IF_ERROR(charge_scored(more, batch.size(), groups, what));
  }
  if (clusters != nullptr) clusters->grow(layer, groups * group_tokens);
  return Status::ok();
}

Status MemoryReservations::charge_batch(const Batch& batch, int64_t sequences) {
  int64_t groups = 0;
  int64_t groups_max = 0;
  int64_t clustered = 0;
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    if (const ClusterStore* clusters = context_.clusters_of(layer)) {
      clustered += cluster_bytes(context_.plan, clusters->room(layer));
    }
    groups += batch.layer(layer).sealed_groups;
    groups_max = std::max(groups_max, batch.layer(layer).sealed_groups);
  }
  const int64_t more = std::max<int64_t>(0, sequences - batch.size());
  Arena arena;
  arena.take(Use::kSummary, more * clustered);
  arena.take(Use::kTables, more * groups * context_.plan.table_bytes_per_group);
  return charge_scored(
      arena, sequences, groups_max,
      "the tables of a batch of " + std::to_string(sequences / context_.options.heads_apart));
}

Status MemoryReservations::charge_projection(int64_t layer) {
  return context_.ledger.charge(Use::kProjections, projection_bytes(context_.plan, layer),
                                "one more projection");
}

Status MemoryReservations::charge_loaded(const Batch& batch, int64_t groups,
                                         int64_t summary_bytes) {
  Arena arena;
  arena.take(Use::kTables,
             context_.options.layers * batch.size() * groups * context_.plan.table_bytes_per_group);
  arena.take(Use::kSummary, summary_bytes);
  KVSWAP_RETURN_IF_ERROR(reserve(batch.size(), groups));
  return charge_scored(arena, batch.size(), groups, "the tables and summaries of what was saved");
}

Status MemoryReservations::charge_cluster_room(const Batch& batch, int64_t layer, int64_t room) {
  if (room == 0) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(context_.ledger.charge(Use::kSummary,
                                                batch.size() * cluster_bytes(context_.plan, room),
                                                "the clusters of what was saved"));
  context_.clusters->grow(layer, room);
  return Status::ok();
}

Status MemoryReservations::charge_summary(const Batch& batch, int64_t layer) {
  const Batch::Layer& state = batch.layer(layer);
  const int64_t groups = state.sealed_groups + batch.due_groups(layer, state.positions);
  return context_.ledger.charge(
      Use::kSummary,
      context_.selector->summaries().bytes_to_append(layer, groups * context_.options.group_tokens),
      "the summary of what is sealed");
}

void MemoryReservations::drain(Batch& batch) {
  const EngineOptions& options = context_.options;
  const int64_t sequences = batch.size() + batch.spares().count();
  int64_t summary = context_.selector->summaries().resident_bytes();
  int64_t tables = sequences * sequence_.of(Use::kTables);
  int64_t staging =
      fixed_.of(Use::kStaging) + (context_.plan.drops ? context_.store->bytes_held() : 0);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const Batch::Layer& state = batch.layer(layer);
    const int64_t due = batch.due_groups(layer, state.positions);
    if (const ClusterStore* clusters = context_.clusters_of(layer)) {
      summary += batch.size() * cluster_bytes(context_.plan, clusters->room(layer));
    }
    summary += context_.selector->summaries().bytes_to_append(layer, due * options.group_tokens);
    tables += batch.size() * (state.sealed_groups + due) * context_.plan.table_bytes_per_group;
    if (context_.plan.drops) staging += batch.size() * due * context_.stored_bytes();
  }
  const auto lower = [this](Use use, int64_t bytes) {
    const int64_t used = context_.ledger.used(use);
    if (used > bytes) context_.ledger.release(use, used - bytes);
  };
  lower(Use::kSummary, summary);
  lower(Use::kTables, tables);
  lower(Use::kStaging, staging);
  lower(Use::kProjections, context_.selector->projection_bytes());
}

void MemoryReservations::release_scores() {
  context_.ledger.release(Use::kScratch, scored_bytes_);
  scored_bytes_ = 0;
}

}  // namespace kvswap
