#include "engine/engine_options.h"

#include <algorithm>
#include <utility>

#include "engine/retention_plan.h"
#include "engine/setting_names.h"
#include "engine/settings_check.h"
#include "kernels/int4_records.h"
#include "memory/arena.h"
#include "memory/replacement.h"
#include "methods/clusters/cluster_store.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

namespace {

/// Of a prompt, clustered together: so many keys stand in memory as fp32 meanwhile.
constexpr int64_t kClusterBlockTokens = 2048;
constexpr int64_t kClusterPagesMax = 16;  // of a cluster in a pool

Status out_of_range(const char* name, int64_t low, int64_t high, int64_t value) {
  return Status::invalid("session: " + std::string(name) + " must be " + std::to_string(low) +
                         ".." + std::to_string(high) + ", got " + std::to_string(value));
}

/// That layers have something to look at, and somebody who looks.
Status check_looks(const EngineOptions& options) {
  const int64_t every = options.steps_between_looks();
  if (every == 0) return Status::ok();
  const std::string got = ", got one that looks every " + std::to_string(every) + " steps";
  if (options.device) {
    return Status::invalid(
        "session: audit must be left out on a device, and its max_missed_mass too" + got +
        "; groups are audited on the CPU only");
  }
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    if (!is_exact(options, layer)) return Status::ok();
  }
  return Status::invalid(
      "session: audit must be left out where selection.dense_layers has every layer, "
      "since nothing is selected that could be missed" +
      got);
}

/// That what layers score, and the heads that are asked, are of this model.
Status check_division(const EngineOptions& options) {
  const std::vector<double>& shares = options.keep_layer_shares;
  if (!shares.empty()) {
    const bool is_any = std::any_of(shares.begin(), shares.end(), [](double x) { return x > 0; });
    if (static_cast<int64_t>(shares.size()) != options.layers || !is_any) {
      return Status::invalid(
          "session: retention.layer_weights must be one number for each layer (" +
          std::to_string(options.layers) + "), one of them above 0, got " +
          std::to_string(shares.size()));
    }
  }
  const std::vector<int64_t>& heads = options.keep_heads;
  if (heads.empty()) return Status::ok();
  if (heads.back() >= options.layers * options.query_heads) {
    return out_of_range("retention.scoring_heads", 0, options.layers * options.query_heads - 1,
                        heads.back());
  }
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const auto first = std::lower_bound(heads.begin(), heads.end(), layer * options.query_heads);
    if (first != heads.end() && *first < (layer + 1) * options.query_heads) continue;
    return Status::invalid(
        "session: retention.scoring_heads must name a head of each layer, got none of layer " +
        std::to_string(layer));
  }
  return Status::ok();
}

/// What has no kernels yet for records in which K is the values too.
Status check_one_side(const EngineOptions& options) {
  const std::string where = "session: where keys are the values too (sides=1) ";
  if (options.device) {
    return Status::invalid(where +
                           "pages must be the host's, since the CPU alone attends them; "
                           "keep the cache in host memory");
  }
  if (options.records != "model" || RetentionPlan(options).has_float8) {
    return Status::invalid(where +
                           "tokens must be kept in the model's dtype, got storage.kv_dtype " +
                           file_word("records", options.records) + " and retention.policy " +
                           file_word("keeper", options.keeper) + ", which round some");
  }
  return Status::ok();
}

/// What has no kernels yet for records whose V is narrower than their K.
Status check_value_dim(const EngineOptions& options) {
  const std::string got = ", got value_dim=" + std::to_string(options.value_dim) +
                          " with head_dim=" + std::to_string(options.head_dim);
  if (options.sides == 1) {
    return Status::invalid("session: value_dim must be 0 where keys are the values too (sides=1)" +
                           got);
  }
  if (options.device) {
    return Status::invalid(
        "session: value_dim must be head_dim on a device, whose kernels take K and V of one "
        "width" +
        got + "; pad the values with zeros, or keep the cache in host memory");
  }
  return Status::ok();
}

}  // namespace

Status EngineOptions::validate() const {
  struct Range {
    const char* name;
    int64_t low, high, value;
  };
  const int64_t width = (heads == "each" ? 1 : kv_heads) * head_dim;
  const Range ranges[] = {
      {"layers", 1, 4096, layers},
      {"kv_heads", 1, 1024, kv_heads},
      {"query_heads", 1, 4096, query_heads},
      {"head_dim", 1, 1024, head_dim},
      {"sides", 1, 2, sides},
      {"value_dim", 0, head_dim, value_dim},
      {"timeline_spans", 0, 1 << 24, timeline_spans},
      {"max_context", -1, kContextMax, max_context},
      {"max_batch", -1, kBatchMax, max_batch},
  };
  const Status checked = check_settings(*this, names_of_paths());
  if (!checked.is_ok()) return Status::invalid("session: " + checked.message());
  // A word that the table has and this build does not know.
  if (!parse_replacement(replacement) || !parse_io_mode(io_mode) || !parse_reader_kind(reader) ||
      (device_model && !find_device_model(*device_model))) {
    return Status::invalid(
        "session: memory.replacement, storage.io_mode, storage.io_backend and "
        "storage.simulated_device must be known, got " +
        replacement + ", " + io_mode + ", " + reader + " and " + device_model.value_or("none"));
  }
  for (const Range& range : ranges) {
    if (range.value < range.low || range.value > range.high) {
      return out_of_range(range.name, range.low, range.high, range.value);
    }
  }
  if (dtype == DType::kInt8) {
    return Status::invalid("session: dtype must be float32, bfloat16 or float16, got int8");
  }
  if (query_heads % kv_heads != 0) {
    return Status::invalid("session: query_heads must be a multiple of kv_heads, got " +
                           std::to_string(query_heads) + " and " + std::to_string(kv_heads));
  }
  if (sides == 1) KVSWAP_RETURN_IF_ERROR(check_one_side(*this));
  const int64_t value_width = record_shape().value_width();
  if (value_width != head_dim) KVSWAP_RETURN_IF_ERROR(check_value_dim(*this));
  for (const int64_t side : {head_dim, value_width}) {
    if (!has_int4_records() || side % kInt4HeadUnit == 0) continue;
    return Status::invalid("session: with storage.kv_dtype int4 head_dim must be a multiple of " +
                           std::to_string(kInt4HeadUnit) +
                           (side == head_dim ? "" : ", and value_dim too") + ", got " +
                           std::to_string(side));
  }
  if (device && has_clusters(*this)) {
    return Status::invalid(
        "session: clusters must be left out where pages are a device's, got some, which the CPU "
        "alone has so far; keep the cache in host memory");
  }
  if (layout == "pools" && pages_a_cluster(method()) > kClusterPagesMax) {
    return Status::invalid(
        "session: with storage.layout paired_pools clusters.max_tokens must be at most " +
        std::to_string(kClusterPagesMax) + " pages of selection.group_tokens (" +
        std::to_string(kClusterPagesMax * group_tokens) + "), got " +
        std::to_string(cluster_tokens_max) +
        "; lower it, raise selection.group_tokens, or leave out storage.layout");
  }
  if (device && RetentionPlan(*this).has_layer_budgets) {
    return Status::invalid(
        "session: retention.policy must not be 'cake' where pages are a device's, nor be "
        "given layer_weights, since the CPU alone divides kept pages among layers; keep the cache "
        "in host memory");
  }
  KVSWAP_RETURN_IF_ERROR(check_method(method()));
  KVSWAP_RETURN_IF_ERROR(check_context(*this, max_context));
  if (SummaryKind::find(rows)->takes_projections && static_cast<int64_t>(ranks.size()) != layers) {
    return Status::invalid("session: summary.rank must have one number for each layer (" +
                           std::to_string(layers) + "), got " + std::to_string(ranks.size()));
  }
  for (const int64_t rank : ranks) {
    if (rank < 1 || rank > width) return out_of_range("summary.rank", 1, width, rank);
  }
  KVSWAP_RETURN_IF_ERROR(check_looks(*this));
  KVSWAP_RETURN_IF_ERROR(check_division(*this));
  // What a kernel chooses at once (kernels/cuda/kernels.h).
  if (device && groups_max > cuda::kTopKMax) {
    return out_of_range("selection.top_k_groups", 1, cuda::kTopKMax, groups_max);
  }
  if (device && new_group_ratio && has_device_kernels(method())) {
    return Status::invalid(
        "session: selection.new_group_ratio must be left out where a device selects, got " +
        std::to_string(*new_group_ratio) + "; its kernels know nothing of the step before");
  }
  if (device && (head_dim > device->head_dim_max || head_dim % device->head_dim_unit != 0)) {
    return Status::invalid("session: head_dim must be a multiple of " +
                           std::to_string(device->head_dim_unit) + " and at most " +
                           std::to_string(device->head_dim_max) + " on this device, got " +
                           std::to_string(head_dim));
  }
  return Status::ok();
}

Status EngineOptions::check_place() const {
  if (!directory.empty()) return Status::ok();
  const std::string end = "; name a folder on a disk";
  if (drops() && device) {
    return Status::invalid(
        "session: directory must be given where pages are a device's, since what a step drops is "
        "the host's, got none" +
        end + ", or keep the cache in host memory");
  }
  if (!drops()) {
    return Status::invalid(
        "session: directory must be given where every token is kept (summary.kind " +
        file_word("rows", rows) + ", retention.policy " + file_word("keeper", keeper) +
        "), got none" + end +
        ", or take what drops tokens: summary.kind none and a retention.policy");
  }
  if (!exact_layers.empty()) {
    return Status::invalid(
        "session: selection.dense_layers must be empty without a directory, since they attend "
        "everything, got some" +
        end);
  }
  if (RetentionPlan(*this).scores_all_tokens) {
    return Status::invalid(
        "session: retention.refresh_scores must be attended without a directory, since what is "
        "dropped cannot be read again, got all_tokens" +
        end);
  }
  const Settings usual;
  const std::pair<const char*, bool> of_a_disk[] = {
      {"storage.simulated_device", device_model == usual.device_model},
      {"storage.max_disk_bytes", disk_quota_bytes == usual.disk_quota_bytes},
  };
  for (const auto& [name, is_usual] : of_a_disk) {
    if (is_usual) continue;
    return Status::invalid("session: " + std::string(name) +
                           " must be left out without a directory, since there is no disk, got "
                           "a value" +
                           end);
  }
  if (base == nullptr) return Status::ok();
  return Status::invalid("session: directory must be given to continue what was saved, got none" +
                         end);
}

EngineOptions EngineOptions::apart() const {
  EngineOptions options = *this;
  if (heads != "each" || heads_apart > 1) return options;
  options.heads_apart = kv_heads;
  options.query_heads = query_heads / kv_heads;
  options.kv_heads = 1;
  if (max_batch > 0) options.max_batch = size_product({max_batch, kv_heads});
  return options;
}

int64_t EngineOptions::group_tokens_min(int64_t alignment_bytes) const {
  EngineOptions tried = *this;
  tried.group_tokens = 1;
  while (2 * tried.payload_bytes() < alignment_bytes) ++tried.group_tokens;
  return tried.group_tokens;
}

DataFileOptions EngineOptions::file_options() const {
  return {.directory = directory,
          .mode = *parse_io_mode(io_mode),
          .quota_bytes = disk_quota_bytes.value_or(-1),
          .extend_bytes = file_extend_bytes,
          .is_wiped = wipe_on_close};
}

ReaderOptions EngineOptions::reader_options() const {
  return {.kind = *parse_reader_kind(reader), .depth = static_cast<int>(read_depth)};
}

MethodOptions EngineOptions::method() const {
  const std::string& word = kvswap::has_clusters(*this) ? cluster_score : score;
  const Score score_kind = word == "sum"    ? Score::kSum
                           : word == "max"  ? Score::kMax
                           : word == "mass" ? Score::kMass
                                            : Score::kMaxMass;
  return {.rows = rows,
          .layers = layers,
          .heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .heads_apart = heads_apart,
          .group_tokens = group_tokens,
          .ranks = ranks,
          .exact_layers = exact_layers,
          .summary_dtype = summary_dtype == "int8"   ? DType::kInt8
                           : summary_dtype == "int4" ? DType::kInt4
                                                     : dtype,
          .score = score_kind,
          .clusters = {.cluster_tokens = cluster_tokens,
                       .cluster_tokens_max = cluster_tokens_max,
                       .split_factor = split_factor,
                       .pending_tokens = pending_tokens,
                       .block_tokens = std::max(kClusterBlockTokens, 2 * cluster_tokens),
                       .update = *parse_cluster_update(cluster_update)},
          .score_columns = score_columns.value_or(0),
          .score_share = score_share,
          .bound_weight = bound_weight,
          .new_group_ratio = new_group_ratio.value_or(1)};
}

std::string why_no_prefetch(const EngineOptions& options) {
  if (options.look_ahead != "verify") return "";
  if (!options.selects()) return "nothing is selected";
  if (SummaryKind::find(options.rows)->is_given) return "scores come from outside";
  const bool is_shared = options.resident_layers && *options.resident_layers < options.layers;
  // Of shared pages those of the layer are free until it attends.
  if (is_shared || options.pages_max > options.groups_max) return "";
  return "memory.pages_per_layer (" + std::to_string(options.pages_max) +
         ") leaves no page beside selection.top_k_groups";
}

LookAheadMode look_ahead_mode(const EngineOptions& options) {
  if (options.look_ahead == "trust") return LookAheadMode::kTrust;
  const bool verifies = options.look_ahead == "verify" && why_no_prefetch(options).empty();
  return verifies ? LookAheadMode::kVerify : LookAheadMode::kOff;
}

PoolOptions pool_options(const EngineOptions& options) {
  const int64_t tokens = options.cluster_tokens + options.group_tokens - 1;
  return {.layers = options.layers,
          .usual_pages = tokens / options.group_tokens,
          .slack_pages = options.pool_slack_pages};
}

RecordShape EngineOptions::record_shape() const {
  return {.kv_heads = heads == "each" ? 1 : kv_heads,
          .group_tokens = group_tokens,
          .head_dim = head_dim,
          .element_bytes = dtype_bytes(dtype),
          .sides = sides,
          .value_dim = value_dim};
}

int64_t EngineOptions::page_bytes() const {
  const int64_t bytes = record_shape().payload_bytes();
  return has_float8_records() ? bytes / dtype_bytes(dtype) : bytes;
}

int64_t EngineOptions::payload_bytes() const {
  const auto packed = packing();
  return packed ? packed->payload_bytes() : page_bytes();
}

int64_t EngineOptions::sealed_groups(int64_t positions) const {
  return std::max<int64_t>(0, positions - tail_tokens) / group_tokens;
}

Status check_context(const EngineOptions& options, int64_t tokens) {
  const bool clusters = has_clusters(options);
  const int64_t most = clusters ? ClusterStore::tokens_most(options.method()) : kContextMax;
  if (tokens <= most) return Status::ok();
  return Status::invalid(
      "session: the context must be at most " + std::to_string(most) + " tokens, got " +
      std::to_string(tokens) +
      (clusters ? ", with clusters.max_tokens (" + std::to_string(options.cluster_tokens_max) +
                      ") so far above clusters.target_tokens (" +
                      std::to_string(options.cluster_tokens) + "); bring them nearer"
                : ""));
}

}  // namespace kvswap
