#include "engine/account.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>

#include "engine/batch.h"
#include "engine/device_space.h"
#include "methods/rows.h"

namespace kvswap {

namespace {

std::string uses_of(const MemoryNeed& need, bool has_device) {
  const auto number = [](const char* name, int64_t bytes) {
    return std::string(name) + " " + std::to_string(bytes);
  };
  return number("pages", need.pages) + (need.kept > 0 ? number(", kept", need.kept) : "") +
         number(", summary", need.summary) + number(", tables", need.tables) +
         number(", staging", need.staging) + number(", projections", need.projections) +
         number(", scratch", need.scratch) +
         (need.timeline > 0 ? number(", timeline", need.timeline) : "") +
         (has_device ? number(", device", need.device) + number(", pinned", need.pinned) : "");
}

}  // namespace

Status Account::charge_timeline(EngineParts& parts) {
  return parts.ledger.charge(Use::kTimeline, Timeline::bytes(parts.options.timeline_spans),
                             "the timeline's spans");
}

Status Account::charge_staging(EngineParts& parts) {
  const MemoryNeed need = memory_need(parts.options, parts.record_bytes(), 0, 0);
  const std::string what = "the staging buffers of writes and long chunks";
  KVSWAP_RETURN_IF_ERROR(parts.ledger.charge(Use::kDevice, need.device, what));
  KVSWAP_RETURN_IF_ERROR(parts.ledger.charge(Use::kPinned, need.pinned, what));
  return parts.ledger.charge(Use::kStaging, need.staging, what);
}

Status Account::check_room(int64_t batch, int64_t context) const {
  const EngineOptions& options = parts_.options;
  const MemoryNeed need = memory_need(options, parts_.record_bytes(), batch, context);
  const std::string of = " for a batch of " + std::to_string(batch / options.heads_apart) +
                         " and a context of " + std::to_string(context) + " tokens";
  if (options.kv_memory_bytes >= 0 && need.total() > options.kv_memory_bytes) {
    EngineOptions enough = options;
    enough.kv_memory_bytes = least_budget(options, parts_.record_bytes(), batch, context);
    const MemoryNeed least = memory_need(enough, parts_.record_bytes(), batch, context);
    return Status::budget(
        "session: kv_memory_bytes must be at least " + std::to_string(enough.kv_memory_bytes) + of +
        " (" + uses_of(least, options.device.has_value()) + "), got " +
        std::to_string(options.kv_memory_bytes) + "; raise it, or lower " +
        (need.kept > 0 ? "keep_tokens, " : "") + "pages_max, rank, the context or the batch");
  }
  const int64_t saved_groups = options.base != nullptr ? options.base->groups : 0;
  const int64_t new_groups = std::max<int64_t>(0, options.sealed_groups(context) - saved_groups);
  int64_t disk_bytes = options.layers;
  const int64_t pages = has_clusters(options) ? cluster_pages_on_disk(options, context) : 0;
  for (const int64_t factor : {batch, new_groups + pages, parts_.record_bytes()}) {
    if (__builtin_mul_overflow(disk_bytes, factor, &disk_bytes)) {
      disk_bytes = std::numeric_limits<int64_t>::max();
      break;
    }
  }
  if (options.drops()) return Status::ok();
  if (options.disk_quota_bytes && disk_bytes > *options.disk_quota_bytes) {
    return Status::budget("session: disk_quota_bytes must be at least " +
                          std::to_string(disk_bytes) + of + ", got " +
                          std::to_string(*options.disk_quota_bytes));
  }
  const auto free = free_bytes(options.directory);
  if (!free.is_ok()) return free.status();
  const int64_t available = free.value() + parts_.file->allocated_bytes();
  if (disk_bytes > available) {
    return Status::storage(
        "session: " + options.directory + " must have " + std::to_string(disk_bytes) +
            " bytes free for a context of " + std::to_string(context) + " tokens, got " +
            std::to_string(available) + "; free some, choose another path, or lower max_context",
        ENOSPC, options.directory);
  }
  return Status::ok();
}

namespace {
constexpr const char* kOneSequence = "the pages and tables of one more sequence";
}  // namespace

Status Account::check_sequence() const {
  const MemoryNeed one = memory_need(parts_.options, parts_.record_bytes(), 1, 0);
  return parts_.ledger.check(one.pages + one.kept + one.tables + one.scratch, kOneSequence);
}

Status Account::charge_sequence() {
  const MemoryNeed one = memory_need(parts_.options, parts_.record_bytes(), 1, 0);
  KVSWAP_RETURN_IF_ERROR(check_sequence());
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kPages, one.pages, kOneSequence));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kKept, one.kept, kOneSequence));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kTables, one.tables, kOneSequence));
  return parts_.ledger.charge(Use::kScratch, one.scratch, kOneSequence);
}

void Account::release_sequence() {
  const MemoryNeed one = memory_need(parts_.options, parts_.record_bytes(), 1, 0);
  parts_.ledger.release(Use::kPages, one.pages);
  parts_.ledger.release(Use::kKept, one.kept);
  parts_.ledger.release(Use::kTables, one.tables);
  parts_.ledger.release(Use::kScratch, one.scratch);
}

Status Account::reserve(int64_t batch, int64_t groups) {
  if (!parts_.options.device) return Status::ok();
  const int64_t unit = groups_unit(parts_.options);
  batch = std::max(batch, reserved_batch_);
  groups = std::max((groups + unit - 1) / unit * unit, reserved_groups_);
  if (batch == reserved_batch_ && groups == reserved_groups_) return Status::ok();
  const DeviceNeed need = device_need(parts_.options, parts_.record_bytes(), batch, groups);
  const int64_t device = need.device - parts_.ledger.used(Use::kDevice);
  const int64_t pinned = need.pinned - parts_.ledger.used(Use::kPinned);
  const std::string what = "what " + std::to_string(batch / parts_.options.heads_apart) +
                           " sequences of " + std::to_string(groups) +
                           " groups need beside their pages";
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.check(device + pinned, what));
  Status reserved = take_place(batch, groups);
  if (!reserved.is_ok()) {
    // What stood there was given up for it, and is taken again.
    const bool is_back =
        reserved_batch_ == 0 || take_place(reserved_batch_, reserved_groups_).is_ok();
    if (!is_back) parts_.broken = reserved;
    return reserved;
  }
  parts_.broken = Status::ok();  // there was room at the second try
  reserved_batch_ = batch;
  reserved_groups_ = groups;
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kDevice, device, what));
  return parts_.ledger.charge(Use::kPinned, pinned, what);
}

Status Account::take_place(int64_t batch, int64_t groups) {
  KVSWAP_RETURN_IF_ERROR(parts_.space->reserve(batch, groups));
  return parts_.selector->reserve(parts_.space->selection_place());
}

int64_t Account::score_bytes_to_add(int64_t sequences, int64_t groups) const {
  return std::max<int64_t>(0, score_bytes(parts_.options, sequences, groups) - scored_bytes_);
}

Status Account::charge_growth(Batch& batch, int64_t layer, int64_t positions) {
  const int64_t group_tokens = parts_.options.group_tokens;
  const int64_t charged = batch.due_groups(layer, batch.layer(layer).positions);
  const int64_t due = batch.due_groups(layer, positions);
  if (due == charged) return Status::ok();
  const int64_t summary_bytes =
      parts_.selector->summaries().bytes_to_append(layer, due * group_tokens) -
      parts_.selector->summaries().bytes_to_append(layer, charged * group_tokens);
  const int64_t groups = batch.layer(layer).sealed_groups + due;
  const int64_t scratch_bytes = score_bytes_to_add(batch.size(), groups);
  ClusterRows* clusters = parts_.clusters_of(layer);
  const int64_t cluster_bytes =
      clusters == nullptr ? 0 : cluster_bytes_to_grow(*clusters, layer, groups * group_tokens);
  const int64_t table_bytes =
      batch.size() * (due - charged) * table_bytes_per_group(parts_.options);
  const std::string what = "a context of " + std::to_string(positions) + " tokens";
  const int64_t record_bytes =
      parts_.options.drops() ? batch.size() * (due - charged) * parts_.record_bytes() : 0;
  const int64_t bytes = summary_bytes + cluster_bytes + table_bytes + scratch_bytes + record_bytes;
  if (!reserve(batch.size(), groups).is_ok()) batch.spares().release(0);
  KVSWAP_RETURN_IF_ERROR(reserve(batch.size(), groups));
  if (!parts_.ledger.check(bytes, what).is_ok()) batch.spares().release(0);
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.check(bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kSummary, summary_bytes + cluster_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kStaging, record_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kTables, table_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kScratch, scratch_bytes, what));
  scored_bytes_ += scratch_bytes;
  if (clusters != nullptr) clusters->grow(layer, groups * group_tokens);
  return Status::ok();
}

int64_t Account::cluster_bytes_to_grow(const ClusterRows& clusters, int64_t layer,
                                       int64_t tokens) const {
  const int64_t room = std::max(clusters.room(layer), ClusterRows::room_for(tokens));
  return clusters.sequences() * (cluster_bytes(parts_.options, room) -
                                 cluster_bytes(parts_.options, clusters.room(layer)));
}

Status Account::charge_batch(const Batch& batch, int64_t sequences) {
  int64_t groups = 0;
  int64_t groups_max = 0;
  int64_t clustered = 0;
  for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
    if (const ClusterRows* clusters = parts_.clusters_of(layer)) {
      clustered += cluster_bytes(parts_.options, clusters->room(layer));
    }
    groups += batch.layer(layer).sealed_groups;
    groups_max = std::max(groups_max, batch.layer(layer).sealed_groups);
  }
  const int64_t more = std::max<int64_t>(0, sequences - batch.size());
  const int64_t table_bytes = more * groups * table_bytes_per_group(parts_.options);
  const int64_t cluster_bytes = more * clustered;
  const int64_t scratch_bytes = score_bytes_to_add(sequences, groups_max);
  const std::string what =
      "the tables of a batch of " + std::to_string(sequences / parts_.options.heads_apart);
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.check(table_bytes + cluster_bytes + scratch_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kSummary, cluster_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kTables, table_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kScratch, scratch_bytes, what));
  scored_bytes_ += scratch_bytes;
  return Status::ok();
}

Status Account::charge_projection(int64_t rank) {
  const EngineOptions& options = parts_.options;
  const int64_t width = options.heads_apart * options.kv_heads * options.head_dim;
  const int64_t bytes = 2 * width * rank * dtype_bytes(projection_dtype(options.summary_type()));
  return parts_.ledger.charge(Use::kProjections, bytes, "one more projection");
}

Status Account::charge_loaded(const Batch& batch, int64_t groups, int64_t summary_bytes) {
  const int64_t table_bytes =
      parts_.options.layers * batch.size() * groups * table_bytes_per_group(parts_.options);
  const int64_t scratch_bytes = score_bytes_to_add(batch.size(), groups);
  const std::string what = "the tables and summaries of what was saved";
  KVSWAP_RETURN_IF_ERROR(reserve(batch.size(), groups));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.check(table_bytes + scratch_bytes + summary_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kTables, table_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kScratch, scratch_bytes, what));
  KVSWAP_RETURN_IF_ERROR(parts_.ledger.charge(Use::kSummary, summary_bytes, what));
  scored_bytes_ += scratch_bytes;
  return Status::ok();
}

Status Account::charge_summary(const Batch& batch, int64_t layer) {
  const Batch::Layer& state = batch.layer(layer);
  const int64_t groups = state.sealed_groups + batch.due_groups(layer, state.positions);
  return parts_.ledger.charge(
      Use::kSummary,
      parts_.selector->summaries().bytes_to_append(layer, groups * parts_.options.group_tokens),
      "the summary of what is sealed");
}

void Account::settle(const Batch& batch) {
  const EngineOptions& options = parts_.options;
  const int64_t sequences = batch.size() + batch.spares().count();
  int64_t summary = parts_.selector->summaries().resident_bytes();
  int64_t tables = memory_need(options, parts_.record_bytes(), sequences, 0).tables;
  int64_t staging = memory_need(options, parts_.record_bytes(), 0, 0).staging +
                    (options.drops() ? parts_.store->bytes_held() : 0);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const Batch::Layer& state = batch.layer(layer);
    const int64_t due = batch.due_groups(layer, state.positions);
    if (const ClusterRows* clusters = parts_.clusters_of(layer)) {
      summary += batch.size() * cluster_bytes(options, clusters->room(layer));
    }
    summary += parts_.selector->summaries().bytes_to_append(layer, due * options.group_tokens);
    tables += batch.size() * (state.sealed_groups + due) * table_bytes_per_group(options);
    if (options.drops()) staging += batch.size() * due * parts_.record_bytes();
  }
  const auto lower = [this](Use use, int64_t bytes) {
    const int64_t used = parts_.ledger.used(use);
    if (used > bytes) parts_.ledger.release(use, used - bytes);
  };
  lower(Use::kSummary, summary);
  lower(Use::kTables, tables);
  lower(Use::kStaging, staging);
  lower(Use::kProjections, parts_.selector->projection_bytes());
}

void Account::release_scores() {
  parts_.ledger.release(Use::kScratch, scored_bytes_);
  scored_bytes_ = 0;
}

}  // namespace kvswap
