#pragma once

// Written by `make schema` from kvswap_torch/config/; change it there.

#include "kvswap/rules.h"
#include "kvswap/settings.h"

namespace kvswap {

inline constexpr int64_t kConfigVersion = 2;

struct ConfigField {
  const char* name;
  bool is_solvable;  // may a row of the table set it?
};
/// Every field that a file of version 1 may have, in the order of messages.
inline constexpr ConfigField kConfigFields[] = {{"reader", true},
                                                {"io_mode", true},
                                                {"read_depth", true},
                                                {"merge_gap_bytes", true},
                                                {"merge_bytes_max", true},
                                                {"checksum", false},
                                                {"io_timeout_seconds", false},
                                                {"wipe_on_close", false},
                                                {"device_model", true},
                                                {"disk_quota_bytes", false},
                                                {"cluster_tokens", true},
                                                {"cluster_tokens_max", true},
                                                {"split_factor", true},
                                                {"pending_tokens", true},
                                                {"cluster_score", true},
                                                {"cluster_update", true},
                                                {"pool_slack_pages", true},
                                                {"group_tokens", true},
                                                {"grouping", true},
                                                {"heads", false},
                                                {"rows", true},
                                                {"records", true},
                                                {"rank", true},
                                                {"summary_dtype", true},
                                                {"score", true},
                                                {"score_columns", true},
                                                {"score_share", true},
                                                {"bound_weight", true},
                                                {"groups_max", true},
                                                {"pages_max", true},
                                                {"resident_layers", true},
                                                {"sink_tokens", true},
                                                {"tail_tokens", true},
                                                {"replacement", true},
                                                {"select_queries_max", true},
                                                {"look_ahead", true},
                                                {"true_query_layers", true},
                                                {"exact_layers", true},
                                                {"keeper", true},
                                                {"keep_tokens", true},
                                                {"keep_share", true},
                                                {"keep_window", true},
                                                {"keep_pool", true},
                                                {"keep_interval", true},
                                                {"keep_scores", true},
                                                {"keep_variance", true},
                                                {"keep_slack", true},
                                                {"keep_ratio", true},
                                                {"keep_count", true},
                                                {"keep_temperatures", true},
                                                {"keep_preference", true},
                                                {"keep_layer_shares", true},
                                                {"keep_layer_least", true},
                                                {"keep_layer_most", true},
                                                {"keep_heads", true},
                                                {"audit_every", true},
                                                {"audit_groups", true},
                                                {"missed_mass_max", true},
                                                {"layout", true},
                                                {"projection_file", false},
                                                {"projection_kind", true},
                                                {"model", false},
                                                {"provenance", false},
                                                {"table", false},
                                                {"version", false}};

/// What a file of version 1 means that leaves settings out.
inline Settings settings_of_version_1() {
  Settings settings;
  settings.look_ahead = "off";
  return settings;
}

/// visit(name, member, rule) for each setting, in the order they are checked in.
template <typename Visit>
void visit_settings(Visit&& visit) {
  visit("reader", &Settings::reader, OneOf{{"auto", "uring", "threads", "sync"}});
  visit("io_mode", &Settings::io_mode, OneOf{{"auto", "direct", "buffered"}});
  visit("read_depth", &Settings::read_depth, IntRange{1, 1024});
  visit("merge_gap_bytes", &Settings::merge_gap_bytes, IntRange{0, 16777216});
  visit("merge_bytes_max", &Settings::merge_bytes_max, IntRange{4096, 268435456});
  visit("checksum", &Settings::checksum, Boolean{});
  visit("io_timeout_seconds", &Settings::io_timeout_seconds, IntRange{0, 16777216});
  visit("wipe_on_close", &Settings::wipe_on_close, Boolean{});
  visit("device_model", &Settings::device_model, OneOf{{"nvme", "ufs", "emmc"}});
  visit("disk_quota_bytes", &Settings::disk_quota_bytes, IntRange{1, 9223372036854775807});
  visit("cluster_tokens", &Settings::cluster_tokens, IntRange{4, 1024});
  visit("cluster_tokens_max", &Settings::cluster_tokens_max, IntRange{4, 4096});
  visit("split_factor", &Settings::split_factor, RealRange{0.001, 1000000.0, "0.001 to 1000000.0"});
  visit("pending_tokens", &Settings::pending_tokens, IntRange{0, 1024});
  visit("cluster_score", &Settings::cluster_score, OneOf{{"sum", "max", "mass", "max_mass"}});
  visit("cluster_update", &Settings::cluster_update, OneOf{{"adaptive", "static", "local"}});
  visit("pool_slack_pages", &Settings::pool_slack_pages, IntRange{0, 16});
  visit("group_tokens", &Settings::group_tokens, IntRange{1, 64});
  visit("grouping", &Settings::grouping, OneOf{{"runs", "clusters"}});
  visit("heads", &Settings::heads, OneOf{{"all", "each"}});
  visit("rows", &Settings::rows, OneOf{{"low_rank", "box", "mean", "centroid", "given", "none"}});
  visit("records", &Settings::records, OneOf{{"model", "fp8", "int4"}});
  visit("rank", &Settings::rank, RankRange{65536});
  visit("summary_dtype", &Settings::summary_dtype, OneOf{{"model", "int8", "int4"}});
  visit("score", &Settings::score, OneOf{{"sum", "max", "mass", "max_mass"}});
  visit("score_columns", &Settings::score_columns, IntRange{1, 65536});
  visit("score_share", &Settings::score_share, RealRange{0.0, 1.0, "0.0 to 1.0"});
  visit("bound_weight", &Settings::bound_weight, RealRange{0.0, 1.0, "0.0 to 1.0"});
  visit("groups_max", &Settings::groups_max, IntRange{1, 1048576});
  visit("pages_max", &Settings::pages_max, IntRange{1, 16777216});
  visit("resident_layers", &Settings::resident_layers, IntRange{2, 65536});
  visit("sink_tokens", &Settings::sink_tokens, IntRange{0, 4096});
  visit("tail_tokens", &Settings::tail_tokens, IntRange{0, 4096});
  visit("replacement", &Settings::replacement,
        OneOf{{"fifo", "lru", "unused", "none", "score", "clusters"}});
  visit("select_queries_max", &Settings::select_queries_max, IntRange{1, 16});
  visit("look_ahead", &Settings::look_ahead, OneOf{{"off", "trust", "verify"}});
  visit("true_query_layers", &Settings::true_query_layers, Numbers{"numbers of layers"});
  visit("exact_layers", &Settings::exact_layers, Numbers{"numbers of layers"});
  visit("keeper", &Settings::keeper,
        OneOf{{"none", "newest", "observed", "heavy", "arkv", "cake", "outliers", "given"}});
  visit("keep_tokens", &Settings::keep_tokens, IntRange{1, 1048576});
  visit("keep_share", &Settings::keep_share, OneOf{{"fixed", "auto"}});
  visit("keep_window", &Settings::keep_window, IntRange{1, 4096});
  visit("keep_pool", &Settings::keep_pool, IntRange{1, 63});
  visit("keep_interval", &Settings::keep_interval, IntRange{0, 1048576});
  visit("keep_scores", &Settings::keep_scores, OneOf{{"attended", "disk"}});
  visit("keep_variance", &Settings::keep_variance, RealRange{0.0, 1000000.0, "0.0 to 1000000.0"});
  visit("keep_slack", &Settings::keep_slack, RealRange{0.0, 1.0, "0.0 to 1.0"});
  visit("keep_ratio", &Settings::keep_ratio, RealRange{0.0, 1.0, "0.0 to 1.0"});
  visit("keep_count", &Settings::keep_count, OneOf{{"bytes", "tokens"}});
  visit("keep_temperatures", &Settings::keep_temperatures,
        RealsRange{3, 0.1, 1000000.0, "0.1 to 1000000.0"});
  visit("keep_preference", &Settings::keep_preference,
        RealsRange{2, 0.1, 1000000.0, "0.1 to 1000000.0"});
  visit("keep_layer_shares", &Settings::keep_layer_shares,
        Reals{0.0, 1000000.0, "0.0 to 1000000.0"});
  visit("keep_layer_least", &Settings::keep_layer_least, IntRange{0, 1048576});
  visit("keep_layer_most", &Settings::keep_layer_most, RealRange{1.0, 4096.0, "1.0 to 4096.0"});
  visit("keep_heads", &Settings::keep_heads, Numbers{"numbers of heads"});
  visit("audit_every", &Settings::audit_every, IntRange{0, 1048576});
  visit("audit_groups", &Settings::audit_groups, IntRange{2, 4096});
  visit("missed_mass_max", &Settings::missed_mass_max, Share{});
  visit("layout", &Settings::layout, OneOf{{"sequence", "pools"}});
  visit("projection_file", &Settings::projection_file, FileName{});
  visit("projection_kind", &Settings::projection_kind,
        OneOf{{"query_aware", "svd_keys", "pca_per_head", "skewed", "channels", "rope_pairs"}});
  visit("new_group_ratio", &Settings::new_group_ratio, Share{});
  visit("exclude_from_summary", &Settings::exclude_from_summary, Boolean{});
}

/// Where a file of version 2 has a setting, and its words for the struct's: new=old.
struct ConfigPath {
  const char* name;
  const char* block;
  const char* field;
  const char* words;
  bool is_solvable;  // may a solution set it?
};
inline constexpr ConfigPath kConfigPaths[] = {
    {"rows", "summary", "kind",
     "low_rank=low_rank min_max=box mean=mean centroid=centroid user=given none=none", true},
    {"rank", "summary", "rank", "", true},
    {"summary_dtype", "summary", "dtype", "auto=model int8=int8 int4=int4", true},
    {"projection_kind", "summary", "projection", "", true},
    {"projection_file", "summary", "projection_file", "", false},
    {"bound_weight", "summary", "half_width_weight", "", true},
    {"score_columns", "summary", "coarse_rank", "", true},
    {"score_share", "summary", "rerank_fraction", "", true},
    {"group_tokens", "selection", "group_tokens", "", true},
    {"heads", "selection", "heads", "joint=all per_head=each", false},
    {"score", "selection", "score", "logit_sum=sum logit_max=max mass_sum=mass mass_max=max_mass",
     true},
    {"groups_max", "selection", "top_k_groups", "", true},
    {"new_group_ratio", "selection", "new_group_ratio", "", true},
    {"sink_tokens", "selection", "sink_tokens", "", true},
    {"tail_tokens", "selection", "recent_tokens", "", true},
    {"exact_layers", "selection", "dense_layers", "", true},
    {"select_queries_max", "selection", "max_step_tokens", "", true},
    {"look_ahead", "prefetch", "mode", "off=off trust=trust verify=verify", true},
    {"true_query_layers", "prefetch", "skip_layers", "", true},
    {"pages_max", "memory", "pages_per_layer", "", true},
    {"replacement", "memory", "replacement",
     "fifo=fifo lru=lru last_step_only=unused no_reuse=none least_attended=score "
     "largest_cluster=clusters",
     true},
    {"resident_layers", "memory", "resident_layers", "", true},
    {"records", "storage", "kv_dtype", "auto=model fp8_e4m3=fp8 int4=int4", true},
    {"layout", "storage", "layout", "append=sequence paired_pools=pools", true},
    {"pool_slack_pages", "storage", "pool_slack_pages", "", true},
    {"reader", "storage", "io_backend", "auto=auto io_uring=uring threads=threads sync=sync", true},
    {"io_mode", "storage", "io_mode", "", true},
    {"read_depth", "storage", "queue_depth", "", true},
    {"merge_gap_bytes", "storage", "coalesce_gap_bytes", "", true},
    {"merge_bytes_max", "storage", "max_read_bytes", "", true},
    {"checksum", "storage", "verify_checksums", "", false},
    {"io_timeout_seconds", "storage", "io_timeout_seconds", "", false},
    {"wipe_on_close", "storage", "wipe_on_close", "", false},
    {"device_model", "storage", "simulated_device", "", true},
    {"disk_quota_bytes", "storage", "max_disk_bytes", "", false},
    {"keep_tokens", "retention", "tokens", "", true},
    {"keep_window", "retention", "window_size", "", true},
    {"keep_pool", "retention", "kernel_size", "", true},
    {"keep_interval", "retention", "refresh_interval", "", true},
    {"keep_scores", "retention", "refresh_scores", "attended=attended all_tokens=disk", true},
    {"keep_share", "retention", "budget", "fixed=fixed prompt_adaptive=auto", true},
    {"exclude_from_summary", "retention", "exclude_from_summary", "", true},
    {"keep_layer_shares", "retention", "layer_weights", "", true},
    {"keep_layer_least", "retention", "min_layer_tokens", "", true},
    {"keep_layer_most", "retention", "max_layer_multiple", "", true},
    {"keep_heads", "retention", "scoring_heads", "", true},
    {"keep_variance", "retention", "variance_weight", "", true},
    {"keep_slack", "retention", "low_watermark", "", true},
    {"keep_ratio", "retention", "original_ratio", "", true},
    {"keep_count", "retention", "budget_unit", "", true},
    {"keep_temperatures", "retention", "oq_temperatures", "", true},
    {"keep_preference", "retention", "preference_temperatures", "", true},
    {"cluster_tokens", "clusters", "target_tokens", "", true},
    {"cluster_tokens_max", "clusters", "max_tokens", "", true},
    {"split_factor", "clusters", "split_variance_ratio", "", true},
    {"pending_tokens", "clusters", "max_pending_tokens", "", true},
    {"cluster_score", "clusters", "score",
     "logit_sum=sum logit_max=max mass_sum=mass mass_max=max_mass", true},
    {"cluster_update", "clusters", "update", "", true},
    {"audit_every", "audit", "interval", "", true},
    {"audit_groups", "audit", "sample_groups", "", true},
    {"missed_mass_max", "audit", "max_missed_mass", "", true},
};

/// A retention policy, the keeper that it is, and its fields.
struct ConfigPolicy {
  const char* policy;
  const char* keeper;
  const char* fields;
};
inline constexpr ConfigPolicy kConfigPolicies[] = {
    {"recent_only", "newest", ""},
    {"snapkv", "observed",
     "tokens window_size kernel_size refresh_interval refresh_scores budget exclude_from_summary"},
    {"compresskv", "observed",
     "tokens window_size kernel_size layer_weights min_layer_tokens max_layer_multiple "
     "scoring_heads"},
    {"h2o", "heavy", "tokens window_size refresh_interval"},
    {"arkv", "arkv",
     "tokens window_size kernel_size variance_weight low_watermark original_ratio budget_unit "
     "oq_temperatures"},
    {"cake", "cake",
     "tokens window_size kernel_size variance_weight preference_temperatures max_layer_multiple"},
    {"key_outliers", "outliers", "tokens"},
    {"user", "given", "tokens refresh_interval"},
};

struct ConfigBlock {
  const char* name;
  bool is_optional;  // without it there is none of what it says
};
inline constexpr ConfigBlock kConfigBlocks[] = {
    {"summary", false}, {"selection", false}, {"prefetch", false}, {"memory", false},
    {"storage", false}, {"retention", true},  {"clusters", true},  {"audit", true},
};

/// `selection.score` of a file that leaves it out, with low-rank keys and otherwise.
inline constexpr const char* kScoreOfLowRank = "mass";
inline constexpr const char* kScoreOfOthers = "sum";
/// `audit.interval` of a block that leaves it out.
inline constexpr int64_t kAuditInterval = 32;

/// `name` is at least `floor`; with a keeper where that is the one.
struct FloorRule {
  const char* name;
  const char* floor;
  const char* why;
  const char* keeper;
};
inline constexpr FloorRule kFloorRules[] = {
    {"pages_max", "groups_max", "since what a step attends must be in memory", ""},
    {"pages_max", "select_queries_max", "a page for each query's choice", ""},
    {"cluster_tokens_max", "cluster_tokens", "which a cluster has on average", ""},
    {"keep_tokens", "group_tokens", "since a group is admitted at once", "arkv"},
    {"keep_tokens", "group_tokens", "since whole groups are retained", "outliers"},
    {"keep_tokens", "keep_layer_least", "since it is what layers have on average", ""},
    {"merge_bytes_max", "merge_gap_bytes", "since a coalesced read holds its gaps", ""},
};

/// `name` has its default, or where there are values none of them, unless `owner` is one
/// of `words`, or none of `but`; each a list of words.
struct OnlyRule {
  const char* name;
  const char* owner;
  const char* words;
  const char* but;
  const char* values;
  const char* why;
};
inline constexpr OnlyRule kOnlyRules[] = {
    {"cluster_tokens", "grouping", "clusters", "", "", ""},
    {"cluster_tokens_max", "grouping", "clusters", "", "", ""},
    {"split_factor", "grouping", "clusters", "", "", ""},
    {"pending_tokens", "grouping", "clusters", "", "", ""},
    {"cluster_score", "grouping", "clusters", "", "", ""},
    {"cluster_update", "grouping", "clusters", "", "", ""},
    {"keep_tokens", "keeper", "observed heavy arkv cake outliers given", "", "", ""},
    {"keep_share", "keeper", "observed", "", "", ""},
    {"keep_window", "keeper", "observed heavy arkv cake", "", "", ""},
    {"keep_pool", "keeper", "observed arkv cake", "", "", ""},
    {"keep_interval", "keeper", "observed heavy given", "", "", ""},
    {"keep_scores", "keeper", "observed", "", "", ""},
    {"keep_variance", "keeper", "arkv cake", "", "", ""},
    {"keep_slack", "keeper", "arkv", "", "", ""},
    {"keep_ratio", "keeper", "arkv", "", "", ""},
    {"keep_count", "keeper", "arkv", "", "", ""},
    {"keep_temperatures", "keeper", "arkv", "", "", ""},
    {"keep_preference", "keeper", "cake", "", "", ""},
    {"keep_layer_shares", "keeper", "observed", "", "", ""},
    {"keep_layer_most", "keeper", "observed cake", "", "", ""},
    {"keep_heads", "keeper", "observed", "", "", ""},
    {"exclude_from_summary", "keeper", "observed", "", "", ""},
    {"keep_layer_shares", "rows", "none", "", "", ""},
    {"keep_layer_shares", "keep_interval", "0", "", "", ""},
    {"keep_heads", "rows", "none", "", "", ""},
    {"keep_heads", "keep_interval", "0", "", "", ""},
    {"audit_every", "rows", "", "none", "", "since nothing is selected"},
    {"missed_mass_max", "rows", "", "none", "", "since nothing is selected"},
    {"rank", "rows", "low_rank", "", "", ""},
    {"projection_file", "rows", "low_rank", "", "", ""},
    {"projection_kind", "rows", "low_rank", "", "", ""},
    {"score_columns", "rows", "low_rank", "", "", ""},
    {"bound_weight", "rows", "box", "", "", ""},
    {"grouping", "rows", "centroid", "", "", ""},
    {"rows", "grouping", "clusters", "", "centroid", ""},
    {"replacement", "grouping", "clusters", "", "clusters", ""},
    {"layout", "grouping", "clusters", "", "pools", ""},
    {"pool_slack_pages", "layout", "pools", "", "", ""},
    {"new_group_ratio", "grouping", "runs", "", "", "since clusters change"},
    {"new_group_ratio", "rows", "", "none", "", "since nothing is selected"},
    {"score", "rows", "low_rank", "", "mass max_mass", ""},
    {"score", "rows", "", "centroid", "max", "since clusters.score says it of clusters"},
    {"score", "rows", "", "given", "max", "since scores come from outside"},
    {"summary_dtype", "rows", "low_rank", "", "int4", ""},
    {"summary_dtype", "rows", "", "centroid", "", "since centroids are float32"},
    {"summary_dtype", "rows", "", "given", "", "since there is no summary"},
    {"pending_tokens", "cluster_update", "", "local", "",
     "since tokens wait for four clusters' worth"},
    {"records", "grouping", "runs", "", "int4",
     "since clusters are packed anew, and four bits would round each time"},
    {"keeper", "grouping", "runs", "", "", "which has not been built for clusters"},
    {"keeper", "rows", "none", "", "newest cake", ""},
    {"keeper", "rows", "", "none", "outliers", "since there are no groups to be left out of"},
    {"keep_share", "rows", "", "none", "", "since no groups are selected"},
    {"exclude_from_summary", "rows", "box mean", "", "", ""},
    {"keep_heads", "heads", "all", "", "", ""},
    {"keep_scores", "keep_interval", "", "0", "", "since nothing is decided while decoding"},
    {"keep_count", "keep_ratio", "", "1", "", "since no token is rounded"},
    {"keep_temperatures", "keep_ratio", "null", "", "", ""},
    {"score_share", "score_columns", "", "null", "", "since all groups are ranked once"},
    {"score_columns", "summary_dtype", "", "int4", "", "which has not been built for two stages"},
    {"score_columns", "score", "", "mass max_mass", "",
     "since a head's softmax needs every token's product"},
    {"score_columns", "projection_kind", "", "pca_per_head skewed channels rope_pairs", "",
     "since its first dimensions are one head's"},
};

/// `name`, or each number of it, is even where `owner` is `word`.
struct EvenRule {
  const char* name;
  const char* owner;
  const char* word;
  const char* why;
};
inline constexpr EvenRule kEvenRules[] = {
    {"rank", "projection_kind", "rope_pairs", "since both channels of a pair are taken"},
};

template <typename Visit>
void visit_identity(Visit&& visit) {
  visit("model_type", &ModelIdentity::model_type);
  visit("layers", &ModelIdentity::layers);
  visit("heads", &ModelIdentity::heads);
  visit("kv_heads", &ModelIdentity::kv_heads);
  visit("head_dim", &ModelIdentity::head_dim);
  visit("dtype", &ModelIdentity::dtype);
  visit("config_hash", &ModelIdentity::config_hash);
}

}  // namespace kvswap
