#pragma once

// Written by `make schema` from kvswap_torch/config.py; change it there.

#include "kvswap/rules.h"
#include "kvswap/settings.h"

namespace kvswap {

inline constexpr int64_t kConfigVersion = 1;

struct ConfigField {
  const char* name;
  bool is_solvable;  // may a row of the table set it?
};
/// Every field that a config file may have, in the order that messages name them.
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
  visit("records", &Settings::records, OneOf{{"model", "fp8"}});
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
  visit("look_ahead", &Settings::look_ahead, Boolean{});
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
}

/// visit(name, member, floor's name, floor's member, why, keeper): what holds between
/// two, with that keeper, or where it is empty with any.
template <typename Visit>
void visit_floors(Visit&& visit) {
  visit("pages_max", &Settings::pages_max, "groups_max", &Settings::groups_max,
        "since what a step attends must be in memory", "");
  visit("pages_max", &Settings::pages_max, "select_queries_max", &Settings::select_queries_max,
        "a page for each query's choice", "");
  visit("cluster_tokens_max", &Settings::cluster_tokens_max, "cluster_tokens",
        &Settings::cluster_tokens, "which a cluster has on average", "");
  visit("keep_tokens", &Settings::keep_tokens, "group_tokens", &Settings::group_tokens,
        "since a group joins what is kept at once", "arkv");
  visit("keep_tokens", &Settings::keep_tokens, "group_tokens", &Settings::group_tokens,
        "since whole groups are kept", "outliers");
  visit("keep_tokens", &Settings::keep_tokens, "keep_layer_least", &Settings::keep_layer_least,
        "since it is what layers have on average", "");
  visit("merge_bytes_max", &Settings::merge_bytes_max, "merge_gap_bytes",
        &Settings::merge_gap_bytes, "since a merged read holds its gaps", "");
}

/// visit(name, member, owner's name, its member, word, values): the setting has its
/// default, or where there are values none of them, unless the owner is that word.
template <typename Visit>
void visit_owned(Visit&& visit) {
  visit("rank", &Settings::rank, "rows", &Settings::rows, "low_rank", OneOf{});
  visit("projection_file", &Settings::projection_file, "rows", &Settings::rows, "low_rank",
        OneOf{});
  visit("projection_kind", &Settings::projection_kind, "rows", &Settings::rows, "low_rank",
        OneOf{});
  visit("score_columns", &Settings::score_columns, "rows", &Settings::rows, "low_rank", OneOf{});
  visit("bound_weight", &Settings::bound_weight, "rows", &Settings::rows, "box", OneOf{});
  visit("grouping", &Settings::grouping, "rows", &Settings::rows, "centroid", OneOf{});
  visit("rows", &Settings::rows, "grouping", &Settings::grouping, "clusters", OneOf{{"centroid"}});
  visit("cluster_tokens", &Settings::cluster_tokens, "grouping", &Settings::grouping, "clusters",
        OneOf{});
  visit("cluster_tokens_max", &Settings::cluster_tokens_max, "grouping", &Settings::grouping,
        "clusters", OneOf{});
  visit("split_factor", &Settings::split_factor, "grouping", &Settings::grouping, "clusters",
        OneOf{});
  visit("pending_tokens", &Settings::pending_tokens, "grouping", &Settings::grouping, "clusters",
        OneOf{});
  visit("cluster_score", &Settings::cluster_score, "grouping", &Settings::grouping, "clusters",
        OneOf{});
  visit("cluster_update", &Settings::cluster_update, "grouping", &Settings::grouping, "clusters",
        OneOf{});
  visit("replacement", &Settings::replacement, "grouping", &Settings::grouping, "clusters",
        OneOf{{"clusters"}});
  visit("layout", &Settings::layout, "grouping", &Settings::grouping, "clusters", OneOf{{"pools"}});
  visit("pool_slack_pages", &Settings::pool_slack_pages, "layout", &Settings::layout, "pools",
        OneOf{});
  visit("score", &Settings::score, "rows", &Settings::rows, "low_rank",
        OneOf{{"mass", "max_mass"}});
  visit("summary_dtype", &Settings::summary_dtype, "rows", &Settings::rows, "low_rank",
        OneOf{{"int4"}});
  visit("keeper", &Settings::keeper, "rows", &Settings::rows, "none", OneOf{{"newest", "cake"}});
  visit("keep_slack", &Settings::keep_slack, "keeper", &Settings::keeper, "arkv", OneOf{});
  visit("keep_ratio", &Settings::keep_ratio, "keeper", &Settings::keeper, "arkv", OneOf{});
  visit("keep_count", &Settings::keep_count, "keeper", &Settings::keeper, "arkv", OneOf{});
  visit("keep_scores", &Settings::keep_scores, "keeper", &Settings::keeper, "observed", OneOf{});
  visit("keep_share", &Settings::keep_share, "keeper", &Settings::keeper, "observed", OneOf{});
  visit("keep_layer_shares", &Settings::keep_layer_shares, "keeper", &Settings::keeper, "observed",
        OneOf{});
  visit("keep_heads", &Settings::keep_heads, "keeper", &Settings::keeper, "observed", OneOf{});
  visit("keep_layer_shares", &Settings::keep_layer_shares, "rows", &Settings::rows, "none",
        OneOf{});
  visit("keep_layer_shares", &Settings::keep_layer_shares, "keep_interval",
        &Settings::keep_interval, "0", OneOf{});
  visit("keep_heads", &Settings::keep_heads, "rows", &Settings::rows, "none", OneOf{});
  visit("keep_heads", &Settings::keep_heads, "keep_interval", &Settings::keep_interval, "0",
        OneOf{});
  visit("keep_heads", &Settings::keep_heads, "heads", &Settings::heads, "all", OneOf{});
  visit("keep_preference", &Settings::keep_preference, "keeper", &Settings::keeper, "cake",
        OneOf{});
  visit("keep_temperatures", &Settings::keep_temperatures, "keep_ratio", &Settings::keep_ratio,
        "null", OneOf{});
}

/// visit(name, member, owner's name, its member, word, why, values): the setting has its
/// default, or where there are values none of them, where the owner is that word.
template <typename Visit>
void visit_idle(Visit&& visit) {
  visit("audit_every", &Settings::audit_every, "rows", &Settings::rows, "none",
        "since nothing is selected", OneOf{});
  visit("missed_mass_max", &Settings::missed_mass_max, "rows", &Settings::rows, "none",
        "since nothing is selected", OneOf{});
  visit("score", &Settings::score, "grouping", &Settings::grouping, "clusters",
        "since cluster_score says it of clusters", OneOf{});
  visit("summary_dtype", &Settings::summary_dtype, "grouping", &Settings::grouping, "clusters",
        "since centroids are float32", OneOf{});
  visit("pending_tokens", &Settings::pending_tokens, "cluster_update", &Settings::cluster_update,
        "local", "since tokens wait for four clusters' worth", OneOf{});
  visit("records", &Settings::records, "grouping", &Settings::grouping, "clusters",
        "which has not been built for clusters", OneOf{});
  visit("keeper", &Settings::keeper, "grouping", &Settings::grouping, "clusters",
        "which has not been built for clusters", OneOf{});
  visit("keep_share", &Settings::keep_share, "rows", &Settings::rows, "none",
        "since no groups are selected", OneOf{});
  visit("score", &Settings::score, "rows", &Settings::rows, "given",
        "since scores come from outside", OneOf{});
  visit("summary_dtype", &Settings::summary_dtype, "rows", &Settings::rows, "given",
        "since there is no summary", OneOf{});
  visit("score_share", &Settings::score_share, "score_columns", &Settings::score_columns, "null",
        "since all groups are scored by all columns", OneOf{});
  visit("score_columns", &Settings::score_columns, "summary_dtype", &Settings::summary_dtype,
        "int4", "which has not been built for two stages", OneOf{});
  visit("score_columns", &Settings::score_columns, "score", &Settings::score, "mass",
        "since a head's softmax needs every token's product", OneOf{});
  visit("score_columns", &Settings::score_columns, "score", &Settings::score, "max_mass",
        "since a head's softmax needs every token's product", OneOf{});
  visit("score_columns", &Settings::score_columns, "projection_kind", &Settings::projection_kind,
        "pca_per_head", "since its first columns are one head's", OneOf{});
  visit("score_columns", &Settings::score_columns, "projection_kind", &Settings::projection_kind,
        "skewed", "since its first columns are one head's", OneOf{});
  visit("score_columns", &Settings::score_columns, "projection_kind", &Settings::projection_kind,
        "channels", "since its first columns are one head's", OneOf{});
  visit("score_columns", &Settings::score_columns, "projection_kind", &Settings::projection_kind,
        "rope_pairs", "since its first columns are one head's", OneOf{});
  visit("keep_tokens", &Settings::keep_tokens, "keeper", &Settings::keeper, "none",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_tokens", &Settings::keep_tokens, "keeper", &Settings::keeper, "newest",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_window", &Settings::keep_window, "keeper", &Settings::keeper, "none",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_window", &Settings::keep_window, "keeper", &Settings::keeper, "newest",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_pool", &Settings::keep_pool, "keeper", &Settings::keeper, "none",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_pool", &Settings::keep_pool, "keeper", &Settings::keeper, "newest",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_interval", &Settings::keep_interval, "keeper", &Settings::keeper, "none",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_interval", &Settings::keep_interval, "keeper", &Settings::keeper, "newest",
        "since no token is kept for what it was paid", OneOf{});
  visit("keep_window", &Settings::keep_window, "keeper", &Settings::keeper, "given",
        "since what tokens are worth comes from outside", OneOf{});
  visit("keep_pool", &Settings::keep_pool, "keeper", &Settings::keeper, "given",
        "since what tokens are worth comes from outside", OneOf{});
  visit("keep_window", &Settings::keep_window, "keeper", &Settings::keeper, "outliers",
        "since no query decides who is kept", OneOf{});
  visit("keep_pool", &Settings::keep_pool, "keeper", &Settings::keeper, "outliers",
        "since no query decides who is kept", OneOf{});
  visit("keep_interval", &Settings::keep_interval, "keeper", &Settings::keeper, "outliers",
        "since no query decides who is kept", OneOf{});
  visit("keeper", &Settings::keeper, "rows", &Settings::rows, "none",
        "since there are no groups to be left out of", OneOf{{"outliers"}});
  visit("keep_scores", &Settings::keep_scores, "keep_interval", &Settings::keep_interval, "0",
        "since nothing is decided while decoding", OneOf{});
  visit("keep_count", &Settings::keep_count, "keep_ratio", &Settings::keep_ratio, "1",
        "since no token is rounded", OneOf{});
  visit("keep_interval", &Settings::keep_interval, "keeper", &Settings::keeper, "arkv",
        "since it is chosen anew where there is no room", OneOf{});
  visit("keep_interval", &Settings::keep_interval, "keeper", &Settings::keeper, "cake",
        "since a prompt alone says what layers have", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "none",
        "since all layers have as many", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "newest",
        "since all layers have as many", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "heavy",
        "since all layers have as many", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "arkv",
        "since all layers have as many", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "outliers",
        "since all layers have as many", OneOf{});
  visit("keep_layer_most", &Settings::keep_layer_most, "keeper", &Settings::keeper, "given",
        "since all layers have as many", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "none",
        "since no token is worth its variance", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "newest",
        "since no token is worth its variance", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "observed",
        "since no token is worth its variance", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "heavy",
        "since no token is worth its variance", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "outliers",
        "since no token is worth its variance", OneOf{});
  visit("keep_variance", &Settings::keep_variance, "keeper", &Settings::keeper, "given",
        "since no token is worth its variance", OneOf{});
  visit("keep_pool", &Settings::keep_pool, "keeper", &Settings::keeper, "heavy",
        "since what each step paid is summed token by token", OneOf{});
}

/// visit(name, member, owner's name, its member, word, why): the setting, or each number
/// of it, is even where the owner is that word.
template <typename Visit>
void visit_even(Visit&& visit) {
  visit("rank", &Settings::rank, "projection_kind", &Settings::projection_kind, "rope_pairs",
        "since both channels of a pair are taken");
}

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
