#pragma once

#include <cstdint>

#include "engine/engine_options.h"

namespace kvswap {

// Pages of a layer and sequence, in options that are apart().

/// Pages that can hold sinks: they may straddle a group's edge.
int64_t sink_pages(const EngineOptions& options);
/// Pages of the tail at its longest, in the middle of a chunk of select_queries_max; where what
/// leaves it joins the kept tokens, of that too.
int64_t tail_pages(const EngineOptions& options);
/// Layers that have pages of records at a time: layer l stands in those of layer l % page_layers().
int64_t page_layers(const EngineOptions& options);
bool shares_pages(const EngineOptions& options);
/// Layers whose tail a crop puts together in pages of the reuse buffers, of each sequence; others
/// need memory for it.
int64_t crop_lenders(const EngineOptions& options);
/// Tokens that wait for their clusters to be read.
int64_t waiting_pages(const EngineOptions& options);
/// That a step attends over at most.
int64_t pages_per_layer(const EngineOptions& options);
/// A page of the tail or of a sink.
int64_t token_page_bytes(const EngineOptions& options, int64_t record_bytes);
/// Exponents of a page that a step attends over; 0: all pages are of the model's dtype.
int64_t page_note_bytes(const EngineOptions& options);
/// Of the clusters of a layer and sequence with room for so many tokens, and of the tables of their
/// pages.
int64_t cluster_bytes(const EngineOptions& options, int64_t room);
/// On disk, of so many tokens of a layer and sequence at most, free pages of pools among them.
int64_t cluster_pages_on_disk(const EngineOptions& options, int64_t tokens);
/// Pages that a cluster is packed anew from at most, and that are read for it.
int64_t cluster_read_pages(const EngineOptions& options);
/// Rows whose tokens enter clusters at a time, on so many threads at most.
int64_t cluster_rows_at_once(const EngineOptions& options);
/// Of the store's tables, for one more group.
int64_t table_bytes_per_group(const EngineOptions& options);

// What writes and long chunks go through.

inline constexpr int64_t kWriteBuffers = 3;
int64_t write_buffers(const EngineOptions& options);
int64_t write_buffer_bytes(const EngineOptions& options, int64_t record_bytes);
/// Neighbours on disk that are nearer become one read.
int64_t gap_bytes(const EngineOptions& options);
/// Groups streamed at once when a long chunk attends over the past.
int64_t past_block_groups(const EngineOptions& options, int64_t record_bytes);
/// Groups of a long chunk that are packed before they are encoded; 0: they are packed as records.
int64_t encoded_at_once(const EngineOptions& options, int64_t record_bytes);
/// Records that stand in memory at once where nothing is on disk (EngineOptions::drops()), of a
/// batch's context.
int64_t records_held(const EngineOptions& options, int64_t batch, int64_t context);
/// Scores of a choice among `groups` of each sequence, where the CPU makes it, and of a turn.
int64_t score_bytes(const EngineOptions& options, int64_t batch, int64_t groups);

/// Bytes by use at a given batch and context: the sum is what kv_memory_bytes must cover, host and
/// device memory alike. The batch is of the options' own sequences: KV heads where they are apart.
struct MemoryNeed {
  int64_t pages = 0;
  int64_t kept = 0;
  int64_t summary = 0;
  int64_t tables = 0;
  int64_t staging = 0;
  int64_t projections = 0;
  int64_t scratch = 0;
  int64_t device = 0;  // on the device, beside pages, summary and projections
  int64_t pinned = 0;  // host memory that copies to and from the device go through
  int64_t timeline = 0;
  int64_t total() const {
    return pages + kept + summary + tables + staging + projections + scratch + device + pinned +
           timeline;
  }
};

MemoryNeed memory_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t context);

/// The smallest kv_memory_bytes that holds what these options need under it; what they have is of
/// no matter. Write buffers grow with it.
int64_t least_budget(EngineOptions options, int64_t record_bytes, int64_t batch, int64_t context);

}  // namespace kvswap
