#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_options.h"
#include "engine/retention_plan.h"
#include "memory/replacement.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// Tokens of a block of the past that is streamed, at most: more gains nothing.
constexpr int64_t kPastBlockTokens = 2048;

/// What an engine's settings come to: words parsed, pages counted, sizes of records and buffers.
///
/// Made once, when an engine is opened or its memory is asked for, and passed by reference; nobody
/// behind it reads a setting's word or looks a kind up by its name. Of options that are valid.
/// Pages are of a layer and one of the logical sequences.
struct Plan {
  /// stored_bytes: of their records, on the disk that there is.
  Plan(const EngineOptions& given, int64_t stored_bytes);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const EngineOptions options;  // apart()
  const RetentionPlan retention;
  const std::vector<bool> exact_layers;  // [layers]
  const MethodOptions method;
  const SummaryKind& rows;
  const Replacement replacement;
  const bool selects;            // groups; else what is kept is attended alone
  const bool keeps_alone;        // of all that is neither sink nor newest: the rest is dropped
  const bool has_clusters;       // they are chosen, in the place of groups
  const bool has_pools;          // where their pages stand
  const bool drops;              // see EngineOptions::drops()
  const int64_t context_max;     // tokens of a sequence that can be counted
  const bool chooses_on_device;  // else a selector on the host, wherever pages are
  const bool has_float8_records;
  const bool has_rounded_records;  // of any kind

  // A group.
  const RecordShape record_shape;  // in the model's dtype, as tail and sinks hold it
  const int64_t group_bytes;       // the same
  const int64_t payload_bytes;     // as pages have it that records are read to
  const int64_t stored_bytes;      // on disk
  const int64_t record_bytes;      // of such a page; where records are packed, more than on disk
  const int64_t note_bytes;        // exponents that are kept in memory with a record of e4m3
  const int64_t token_page_bytes;  // of a page of the tail, of a sink or of retained tokens

  // Pages.
  const int64_t sink_pages;   // they may straddle a group's edge
  const int64_t tail_pages;   // see tail_pages()
  const int64_t page_layers;  // that have pages of records at a time: l stands in l % page_layers
  const bool shares_pages;
  const int64_t waiting_pages;          // of tokens that wait for their clusters
  const int64_t pages_per_layer;        // that a step attends over at most
  const int64_t page_note_bytes;        // exponents of one of them; 0: all are of the model's dtype
  const int64_t cluster_read_pages;     // that a cluster is packed anew from at most
  const int64_t table_bytes_per_group;  // of the store's tables, and of what is kept beside them

  // What writes and long chunks go through.
  static constexpr int64_t kWriteBuffers = 3;
  const int64_t write_buffers;
  const int64_t write_buffer_bytes;
  const int64_t gap_bytes;          // neighbours on disk that are nearer become one read
  const int64_t past_block_groups;  // streamed at once when a long chunk attends over the prefix
  const int64_t encoded_at_once;    // groups of a long chunk; 0: they are packed as records
  const int64_t groups_unit;        // groups are made room for on a device in multiples of this

  /// Do tokens stay in the layer's memory because of the attention they received?
  bool keeps_tokens(int64_t layer) const { return retention.kind.keeps_tokens && !is_exact(layer); }
  /// Does the layer attend everything, whatever its queries are?
  bool is_exact(int64_t layer) const { return exact_layers[layer]; }
  /// So many of a sequence's first tokens are sealed once it has `context`, and nothing is pending.
  int64_t sealed_tokens(int64_t context) const;
  /// Of one sequence's step, for so many numbers of each token that it attended (StepAttention): 0,
  /// 1 or 2.
  int64_t step_attention_bytes(int64_t numbers) const;
  /// Numbers by which pages leave that received the least attention, as above.
  int64_t page_numbers() const { return replacement == Replacement::kScore && selects ? 1 : 0; }
};

/// Pages of the tail at its longest, in the middle of a chunk of select_queries_max; where what
/// leaves it joins the retained tokens, of that too.
int64_t tail_pages(const Settings& settings);

/// What an engine is to hold: of the logical sequences, KV heads where they are apart.
struct Extent {
  int64_t batch = 0;
  int64_t context = 0;  // tokens of each
};

}  // namespace kvswap
