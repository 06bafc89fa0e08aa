#pragma once

// Written by `make schema` from kvswap_torch/config.py; change it there.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kvswap {

/// One rank for all layers on disk, or one for each.
using Rank = std::variant<int64_t, std::vector<int64_t>>;

/// What the tuner decides and a session obeys: fields of kvswap_torch.SwapConfig.
struct Settings {
  /// who reads; auto: the fastest that works
  std::string reader = "auto";
  /// O_DIRECT or the page cache; auto: O_DIRECT if able
  std::string io_mode = "auto";
  /// reads in flight at once
  int64_t read_depth = 64;
  /// neighbouring reads are merged over a gap up to this
  int64_t merge_gap_bytes = 16384;
  /// longest merged read
  int64_t merge_bytes_max = 262144;
  /// verify every record that is read
  bool checksum = true;
  /// a read or write without progress for longer is an error; 0: never
  int64_t io_timeout_seconds = 60;
  /// overwrite what was written to the file, the pages and the write buffers with zeros before
  /// they are given back; close() then takes as long as writing the file again
  bool wipe_on_close = false;
  /// delay reads as a modelled device would, for experiments; None: the real disk only
  std::optional<std::string> device_model;
  /// most bytes on disk; None: what the disk has free
  std::optional<int64_t> disk_quota_bytes;
  /// tokens of a cluster that a prompt is divided into, on average
  int64_t cluster_tokens = 16;
  /// that no cluster exceeds
  int64_t cluster_tokens_max = 32;
  /// a cluster is split when its variance exceeds so many times the mean of its layer's and
  /// sequence's first clusters
  double split_factor = 1.25;
  /// tokens of each layer and sequence that left the tail and wait in memory, attended all the
  /// same, until their clusters are read; with more of them one is read for them
  int64_t pending_tokens = 16;
  /// what a cluster is worth, by its centroid: as score, which is for groups
  std::string cluster_score = "sum";
  /// how tokens enter that come after a prompt: adaptive ones join the nearest cluster and
  /// split it, static ones join the nearest that has room and change nothing of it, local ones
  /// wait until they fill four clusters and are clustered among themselves
  std::string cluster_update = "adaptive";
  /// with layout=pools: free pages between the two clusters of a new pool, which both grow
  /// into; each has one more at its other end
  int64_t pool_slack_pages = 2;
  /// tokens of one layer and sequence that are selected and read together (G)
  int64_t group_tokens = 4;
  /// which tokens are selected and read together: runs of group_tokens; or clusters of similar
  /// keys, whose pages hold group_tokens each, and which split while decoding (DynaKV; with
  /// rows=centroid)
  std::string grouping = "runs";
  /// who chooses groups: all KV heads of a sequence together, or each for itself, with records
  /// and pages of its own; rank, groups_max and pages_max then count for each KV head
  std::string heads = "all";
  /// what stays in memory of the keys, to score groups by: low-rank rows of each token
  /// (KVSwap); the box around the keys of a group (Quest) or their mean (ShadowKV), which need
  /// no projection; the centroids of clusters (DynaKV); given: what your own group_scores
  /// keeps, and says; or nothing, and every layer attends everything, restored from disk
  std::string rows = "low_rank";
  /// what a record on disk, and its page in memory, holds: the model's dtype, or e4m3 with one
  /// power of two for the K of a KV head and one for its V, in half the bytes (a quarter of
  /// float32's); sinks and tail keep the model's dtype
  std::string records = "model";
  /// columns of the low-rank summary: one number, or one for each layer on disk; doubled when
  /// the projection is computed from the first prefill
  Rank rank = 32;
  /// precision of the summary's rows: the model's dtype, int8, or int4, two columns to a byte;
  /// the last two with one scale a row
  std::string summary_dtype = "model";
  /// what a group is worth: its largest product with the sum of all heads' queries (the paper),
  /// with the query of any head, the attention paid to it summed over heads, or that of the
  /// head that pays most
  std::string score = "sum";
  /// columns of a row that all groups are scored by first, where it has more; then the best
  /// score_share by all columns, which reads less but does not choose quite the same. None: all
  /// groups by all columns
  std::optional<int64_t> score_columns;
  /// of each 1,024 tokens' blocks of 16, those whose groups are scored by all columns; at least
  /// as many in all as groups_max, so that of a short context all are
  double score_share = 0.2;
  /// of a box's half width in a group's score; 1 bounds each key's (Quest)
  double bound_weight = 1.0;
  /// groups attended per layer, sequence and step, sinks and tail apart (M)
  int64_t groups_max = 100;
  /// groups kept in memory per layer and sequence (C); at least groups_max; what is above it is
  /// the reuse buffer
  int64_t pages_max = 200;
  /// layers that have groups in memory at a time; each gives its pages to the layer so many
  /// behind it, and reads what it attends from disk in every step (DynaKV 6.1). None: all, and
  /// a reuse buffer for each
  std::optional<int64_t> resident_layers;
  /// first valid tokens of each sequence, always in memory and attended
  int64_t sink_tokens = 4;
  /// newest tokens, always in memory and attended, sealed group by group
  int64_t tail_tokens = 32;
  /// who leaves the reuse buffer: the oldest load (the paper), the least recently used,
  /// whatever this step did not use (the published research code), or with none everybody
  /// before the next step, to measure what reuse saves; with score who was paid least attention
  /// when it was last attended, which costs a look at the keys in each step; with clusters a
  /// page of the largest cluster, and last of all one that was written anew
  std::string replacement = "fifo";
  /// longest step of decoding, which attends the union of its tokens' selections
  int64_t select_queries_max = 8;
  /// predict the next layer's query and read ahead; off: choose with the true query. For
  /// projections that were calibrated for it: the tuner's
  bool look_ahead = false;
  /// layers on disk that choose with their true query all the same, since the layer before
  /// tells too little of it; what they read is not hidden
  std::vector<int64_t> true_query_layers;
  /// layers on disk that attend everything: they have no summary, and what is not in memory is
  /// restored from disk in every step
  std::vector<int64_t> exact_layers;
  /// which tokens stay in memory, and are attended in every step, whatever is asked: none but
  /// sinks and tail; with rows=none newest, the same with nothing else attended (StreamingLLM);
  /// observed, those that the newest queries of a prompt paid most attention (SnapKV, PRKV);
  /// heavy, the same summed up over all steps since (H2O); arkv, those of a prompt whose
  /// attention is high or varies much, and all that is decoded, until there is no room (ARKV);
  /// cake, as observed by attention that is high or varies much, more of them in layers whose
  /// attention is spread over many tokens and changes (CAKE); outliers, the groups of a prompt
  /// whose mean stands for their keys worst (ShadowKV); or given, those that your own
  /// token_scores says are worth most. With rows=none they alone are attended: the others stay
  /// on disk
  std::string keeper = "none";
  /// tokens that stay, of each layer and sequence, on average where layers differ; with
  /// heads=each of each KV head
  int64_t keep_tokens = 256;
  /// how many tokens stay: keep_tokens; or, decided by each prompt, as many as the first and
  /// the last of its newest keep_window queries agree on, of as many as groups_max groups hold,
  /// but at most keep_tokens. So many groups fewer are selected
  std::string keep_share = "fixed";
  /// newest queries whose attention decides which tokens stay
  int64_t keep_window = 32;
  /// neighbours, itself in the middle, that a token's attention is averaged over
  int64_t keep_pool = 5;
  /// decoded tokens after which it is decided anew which tokens stay, by what the newest
  /// keep_window queries paid those that they attended; 0: after each prompt alone
  int64_t keep_interval = 0;
  /// what such a decision goes by: what queries paid the tokens that they attended, or what
  /// they would have paid all tokens, for which every keep_interval tokens a layer's records
  /// are read twice
  std::string keep_scores = "attended";
  /// a token is worth its mean attention plus so many times the variance (gamma)
  double keep_variance = 0.0;
  /// share of kept tokens that stay when there is no room for more (alpha)
  double keep_slack = 0.75;
  /// share of keep_tokens that stays in the model's dtype when there is no room for more;
  /// others become e4m3 and take as much less; None: what a prompt's attention says of a layer
  std::optional<double> keep_ratio = 1.0;
  /// what keep_tokens counts where some are e4m3: the bytes of so many in the model's dtype, so
  /// that more of e4m3 fit, or tokens of either kind
  std::string keep_count = "bytes";
  /// with keep_ratio None: roots that are taken of a prompt's entropy, variance and kurtosis
  /// before they are multiplied (tau); the larger, the less it counts
  std::vector<double> keep_temperatures = {7.774380648611771, 5.407015096778621, 5.527702582901318};
  /// with keeper=cake: roots that are taken of how far a layer's attention is spread, and of
  /// how much it changes, before they are multiplied (tau 1, tau 2)
  std::vector<double> keep_preference = {1.0, 1.0};
  /// what each layer on disk is worth, in any unit: of keep_tokens for each layer on average a
  /// layer has that part (CompressKV). Empty: all have as many
  std::vector<double> keep_layer_shares;
  /// tokens that a layer has at least, by its share
  int64_t keep_layer_least = 0;
  /// where layers differ: times what they have on average, the newest keep_window included,
  /// that one may have; memory for a step is counted by it
  double keep_layer_most = 3.0;
  /// query heads whose attention alone decides which tokens stay, numbered through all layers
  /// on disk: head h of layer l is l times the heads of a layer, plus h (CompressKV's semantic
  /// retrieval heads). Empty: all
  std::vector<int64_t> keep_heads;
  /// decoding steps between two looks of a layer at groups that were not selected, to estimate
  /// how much attention they would have had (missed_mass in stats()); 0: never
  int64_t audit_every = 0;
  /// groups of each chooser that such a look reads, drawn at random
  int64_t audit_groups = 16;
  /// attention that a layer may miss: by what its looks find, it attends fewer groups than
  /// groups_max, or more, up to pages_max; without audit_every it looks once in 32 steps
  std::optional<double> missed_mass_max;
  /// where records stand on disk: in the order in which they are sealed; or, with clusters,
  /// their pages in pools of two clusters that grow towards each other (DynaKV 5.2), so that
  /// one read fetches a cluster, however it has grown
  std::string layout = "sequence";
  /// safetensors file, relative to the config; None: computed from the first prefill
  std::optional<std::string> projection_file;
  /// the best bilinear form of queries and keys, the paper's SVD of the keys, or one block for
  /// each KV head: principal components of its keys (Loki), the columns that weigh most of keys
  /// and queries rotated by the queries' SVD (InfiniGen), the channels of its keys that the
  /// newest queries meet most (ThinK), or such pairs of channels that RoPE turns together, for
  /// which rank is even; blocks are never doubled
  std::string projection_kind = "query_aware";

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
