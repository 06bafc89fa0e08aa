#pragma once

// Written by `make schema` from kvswap_torch/config/; change it there.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kvswap {

/// One rank for all layers on disk, or one for each.
using Rank = std::variant<int64_t, std::vector<int64_t>>;

/// What the tuner decides and a session obeys: settings of kvswap_torch.SwapConfig.
/// Each begins with its place in a config file; names and words are version 1's.
struct Settings {
  /// storage.io_backend: Reader. auto: the fastest that works.
  std::string reader = "auto";
  /// storage.io_mode: direct: O_DIRECT. buffered: the page cache. auto: direct if possible.
  std::string io_mode = "auto";
  /// storage.queue_depth: Reads in flight at once.
  int64_t read_depth = 64;
  /// storage.coalesce_gap_bytes: Neighbouring reads are coalesced over a gap up to this.
  int64_t merge_gap_bytes = 16384;
  /// storage.max_read_bytes: Longest coalesced read.
  int64_t merge_bytes_max = 262144;
  /// storage.verify_checksums: Verify the checksum of every record that is read.
  bool checksum = true;
  /// storage.io_timeout_seconds: A read or write without progress for longer is an error. 0:
  /// never.
  int64_t io_timeout_seconds = 60;
  /// storage.wipe_on_close: Overwrite the file, pages and write buffers with zeros before they
  /// are freed. close() then takes as long as writing the file again.
  bool wipe_on_close = false;
  /// storage.simulated_device: Delay reads like a simulated device, for experiments. null: the
  /// real disk alone.
  std::optional<std::string> device_model;
  /// storage.max_disk_bytes: Most bytes on disk. null: the disk's free space.
  std::optional<int64_t> disk_quota_bytes;
  /// clusters.target_tokens: Tokens of a cluster after a prompt, on average.
  int64_t cluster_tokens = 16;
  /// clusters.max_tokens: Most tokens of a cluster.
  int64_t cluster_tokens_max = 32;
  /// clusters.split_variance_ratio: A cluster is split if its variance exceeds the mean of its
  /// layer's and sequence's first clusters by this factor.
  double split_factor = 1.25;
  /// clusters.max_pending_tokens: Decoded tokens of a layer and sequence that may stay in
  /// memory until their cluster is loaded. They are attended. Beyond this number a cluster is
  /// read to store them.
  int64_t pending_tokens = 16;
  /// clusters.score: A cluster's score, by its centroid: as selection.score.
  std::string cluster_score = "sum";
  /// clusters.update: What becomes of decoded tokens. adaptive: join the nearest cluster, which
  /// may split. static: join the nearest with free space. local: clustered among themselves,
  /// four clusters' worth at a time.
  std::string cluster_update = "adaptive";
  /// storage.pool_slack_pages: With paired_pools: free pages between the two clusters of a new
  /// pool. Each has one more at its other end.
  int64_t pool_slack_pages = 2;
  /// selection.group_tokens: Consecutive tokens of one layer and sequence, selected and read
  /// together (G).
  int64_t group_tokens = 4;
  /// runs of tokens are selected, or clusters (the block clusters)
  std::string grouping = "runs";
  /// selection.heads: joint: all KV heads of a sequence share one selection. per_head: each KV
  /// head selects for itself and has its own records and pages; rank, top_k_groups and
  /// pages_per_layer then count for each KV head.
  std::string heads = "all";
  /// summary.kind: What memory holds to rank groups. low_rank: a vector for each token
  /// (KVSwap). min_max (Quest) and mean (ShadowKV): for each group; no projection. centroid: of
  /// clusters. user: your group_scores. none: nothing is ranked.
  std::string rows = "low_rank";
  /// storage.kv_dtype: Type of records. auto: the model's dtype. fp8_e4m3: half the bytes (a
  /// quarter of float32's) on disk and in pages, with one power of two for each KV head's K and
  /// V. Of clusters: on disk alone, with powers of two for each token. int4: 0.27 to 0.32 of
  /// bfloat16's bytes on disk, the model's dtype in pages. Sinks and recent tokens keep the
  /// model's dtype.
  std::string records = "model";
  /// summary.rank: Dimensions of a low-rank key: one number, or one for each layer on disk.
  /// Doubled if the projection is estimated from the first prompt. Memory and time of ranking
  /// grow with it.
  Rank rank = 32;
  /// summary.dtype: Precision of the summary. auto: the model's dtype. int8 and int4: with one
  /// scale for each vector.
  std::string summary_dtype = "model";
  /// selection.score: A group's score. mass_sum: its attention mass, summed over heads.
  /// mass_max: the largest of a head. logit_max: the largest logit of a head. logit_sum: of all
  /// queries' sum (KVSwap). Default: mass_sum with summary.kind=low_rank, else logit_sum.
  std::string score = "sum";
  /// summary.coarse_rank: Dimensions of a first, coarse ranking; the best rerank_fraction is
  /// ranked again by all. Reads less and may select other groups. null: one ranking by all.
  std::optional<int64_t> score_columns;
  /// summary.rerank_fraction: With coarse_rank: fraction of the 16-token blocks in every 1,024
  /// tokens that are ranked again by all dimensions. At least top_k_groups blocks in total.
  double score_share = 0.2;
  /// summary.half_width_weight: With min_max: how much of a group's half width counts in its
  /// score. 1: an upper bound for each key (Quest).
  double bound_weight = 1.0;
  /// selection.top_k_groups: Groups attended for each layer, sequence and step, in addition to
  /// sinks and recent tokens (M). More is more accurate and slower.
  int64_t groups_max = 100;
  /// memory.pages_per_layer: Pages for each layer and sequence, at least top_k_groups (C).
  /// Pages beyond top_k_groups form the reuse buffer.
  int64_t pages_max = 200;
  /// memory.resident_layers: Layers that have pages at a time; each passes its pages on and
  /// reads what it attends in every step (DynaKV 6.1). null: all layers, with a reuse buffer
  /// each.
  std::optional<int64_t> resident_layers;
  /// selection.sink_tokens: First valid tokens of each sequence, always in memory and attended.
  int64_t sink_tokens = 4;
  /// selection.recent_tokens: Newest tokens, always in memory and attended; written to disk
  /// group by group.
  int64_t tail_tokens = 32;
  /// memory.replacement: Which page the reuse buffer replaces. fifo (KVSwap), lru,
  /// last_step_only: all that the last step did not use (published code), least_attended: reads
  /// the keys once more each step, largest_cluster: with clusters, no_reuse: all, for
  /// measurements.
  std::string replacement = "fifo";
  /// selection.max_step_tokens: Longest decoding step in tokens; it attends the union of its
  /// tokens' selections.
  int64_t select_queries_max = 8;
  /// prefetch.mode: What the next layer's predicted query does. verify: its groups are read
  /// ahead, and the layer selects by its own query. trust: they are attended too; for models
  /// and projections that a calibration found fit for it. off: nothing is predicted.
  std::string look_ahead = "verify";
  /// prefetch.skip_layers: Layers without prefetch, because the previous layer does not predict
  /// their query. They select by their own query; their reads are not overlapped.
  std::vector<int64_t> true_query_layers;
  /// selection.dense_layers: Layers on disk that attend every token. They have no summary; each
  /// step reads what is not in memory.
  std::vector<int64_t> exact_layers;
  /// which tokens are retained (retention.policy); none: no such block
  std::string keeper = "none";
  /// retention.tokens: Tokens retained of each layer and sequence, on average if layers differ.
  /// With selection.heads=per_head: of each KV head.
  int64_t keep_tokens = 256;
  /// retention.budget: fixed: retain tokens. prompt_adaptive (PRKV, app. G): retain the overlap
  /// of the top-k tokens of the window's first and last query, at most tokens; top_k_groups
  /// shrinks by as many groups.
  std::string keep_share = "fixed";
  /// retention.window_size: Newest queries whose attention decides which tokens are retained.
  int64_t keep_window = 32;
  /// retention.kernel_size: Neighbouring tokens, itself in the middle, that a token's score is
  /// averaged over.
  int64_t keep_pool = 5;
  /// retention.refresh_interval: Decoded tokens between two refreshes of the retained set. 0:
  /// after each prompt alone.
  int64_t keep_interval = 0;
  /// retention.refresh_scores: Scores of a refresh during decoding. attended: attention over
  /// the tokens that were attended; reads nothing. all_tokens (PRKV Alg. 1): over every earlier
  /// token; reads the layer's records twice.
  std::string keep_scores = "attended";
  /// retention.variance_weight: A token's score is its mean attention plus this times the
  /// variance (gamma).
  double keep_variance = 0.0;
  /// retention.low_watermark: Fraction of retained tokens that stay when the budget is full
  /// (alpha).
  double keep_slack = 0.75;
  /// retention.original_ratio: Fraction of tokens kept in the model's dtype when the budget is
  /// full; the rest become fp8 e4m3. null: for each layer, from the prompt's attention (ARKV's
  /// OQ ratio).
  std::optional<double> keep_ratio = 1.0;
  /// retention.budget_unit: What tokens counts if some are e4m3. bytes: the bytes of that many
  /// in the model's dtype, so that more e4m3 tokens fit. tokens: tokens of either kind.
  std::string keep_count = "bytes";
  /// retention.oq_temperatures: If original_ratio is null: roots taken of a prompt's entropy,
  /// variance and kurtosis before they are multiplied (tau). The larger, the less it counts.
  std::vector<double> keep_temperatures = {7.774380648611771, 5.407015096778621, 5.527702582901318};
  /// retention.preference_temperatures: Roots taken of the spread of a layer's attention, and
  /// of its change, before they are multiplied (tau 1, tau 2).
  std::vector<double> keep_preference = {1.0, 1.0};
  /// retention.layer_weights: One number for each layer on disk, in any unit: a layer retains
  /// that part of all layers' tokens. Empty: all retain as many.
  std::vector<double> keep_layer_shares;
  /// retention.min_layer_tokens: Tokens that a layer retains at least.
  int64_t keep_layer_least = 0;
  /// retention.max_layer_multiple: Upper bound on one layer's tokens, as a multiple of the
  /// average (window_size included). Per-step buffers are sized for it.
  double keep_layer_most = 3.0;
  /// retention.scoring_heads: Query heads whose attention alone is used, numbered through all
  /// layers on disk: head h of layer l is l times the heads of a layer, plus h. Empty: all.
  std::vector<int64_t> keep_heads;
  /// audit.interval: Decoding steps between two samples of a layer (missed_mass in stats()).
  int64_t audit_every = 0;
  /// audit.sample_groups: Groups that a sample reads for each selection, drawn at random.
  int64_t audit_groups = 16;
  /// audit.max_missed_mass: Attention that a layer may miss. Samples then adapt how many groups
  /// it attends: fewer than top_k_groups, or more, up to pages_per_layer. null: not adapted.
  std::optional<double> missed_mass_max;
  /// storage.layout: Record placement on disk. append: in the order of sealing. paired_pools:
  /// with clusters, in pools of two that grow towards each other (DynaKV 5.2); one read fetches
  /// a cluster.
  std::string layout = "sequence";
  /// summary.projection_file: A safetensors file with the projections, relative to the config.
  /// null: estimated from the first prompt.
  std::optional<std::string> projection_file;
  /// summary.projection: How keys are compressed. query_aware: the best bilinear form of the
  /// logits. svd_keys: KVSwap. One block for each KV head, never doubled: pca_per_head (Loki),
  /// skewed (InfiniGen), channels (ThinK), rope_pairs (even rank).
  std::string projection_kind = "query_aware";
  /// selection.new_group_ratio: A group that the step before did not attend must be among the
  /// best top_k_groups times this. Reads less from disk, and attends fewer tokens. null: all
  /// top_k_groups are free.
  std::optional<double> new_group_ratio;
  /// retention.exclude_from_summary: Group bounds or means leave retained tokens out, and are
  /// recomputed when the retained set changes (PRKV Alg. 1, lines 9-14). Reads the groups that
  /// change. Records stay.
  bool exclude_from_summary = false;

  bool operator==(const Settings&) const = default;
};

/// What of a model a config depends on; nothing: not known, not compared.
struct ModelIdentity {
  std::optional<std::string> model_type;
  std::optional<int64_t> layers;
  std::optional<int64_t> heads;
  std::optional<int64_t> kv_heads;
  std::optional<int64_t> head_dim;
  std::optional<std::string> dtype;
  std::optional<std::string> config_hash;

  bool operator==(const ModelIdentity&) const = default;
};

}  // namespace kvswap
