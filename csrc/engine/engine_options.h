#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device.h"
#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/readers.h"
#include "io/status.h"
#include "kernels/records.h"
#include "kernels/types.h"
#include "memory/replacement.h"

namespace kvswap {

/// What an engine is made of. kvswap_torch.SwapConfig documents each decision.
struct EngineOptions {
  // The model: layers that live on disk, and the shape of one token entry.
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kFloat32;

  // Where and how the bytes are kept.
  DataFileOptions file;
  ReaderOptions reader;
  std::string device_model;  // empty: the disk as it is
  // Put something between the engine and its file or reader: a measurement, a fault.
  std::function<std::unique_ptr<DataFile>(std::unique_ptr<DataFile>)> wrap_file;
  std::function<std::unique_ptr<BlockReader>(std::unique_ptr<BlockReader>)> wrap_reader;
  int64_t merge_gap_bytes = 16 << 10;
  int64_t merge_bytes_max = 256 << 10;
  bool checksum = true;
  std::optional<DeviceKind> device;  // where pages, summaries and tokens live; none: host memory

  // What is selected and kept.
  int64_t group_tokens = 4;
  std::vector<int64_t> ranks;  // [layers]
  DType summary_dtype = DType::kFloat32;
  int64_t groups_max = 100;
  int64_t pages_max = 200;
  int64_t sink_tokens = 4;
  int64_t tail_tokens = 32;
  Replacement replacement = Replacement::kFifo;
  int64_t select_queries_max = 8;

  // Promises; -1: none.
  int64_t kv_memory_bytes = -1;
  int64_t max_context = -1;
  int64_t max_batch = -1;

  int64_t timeline_spans = 0;  // how many of the newest are kept; 0: nothing is recorded

  Status validate() const;

  RecordShape record_shape() const;
  int64_t payload_bytes() const { return record_shape().payload_bytes(); }  // of one record
  /// Pages that can hold sinks: they may straddle a group's edge.
  int64_t sink_pages() const;
  /// Pages of the tail at its longest, in the middle of a chunk of select_queries_max.
  int64_t tail_pages() const;
  int64_t pages_per_layer() const { return pages_max + sink_pages() + tail_pages(); }
  /// Groups that are sealed once `columns` tokens are there and nothing is pending.
  int64_t sealed_groups(int64_t columns) const;
  int64_t write_buffer_bytes(int64_t record_bytes) const;
  /// Scores of a choice among `groups` of each sequence, where the CPU makes it.
  int64_t score_bytes(int64_t batch, int64_t groups) const;
  /// Groups streamed at once when a long chunk attends over the past.
  int64_t past_block_groups(int64_t record_bytes) const;
};

inline constexpr int64_t kWriteBuffers = 3;

/// Bytes by use at a given batch and context: the sum is what kv_memory_bytes must cover, host and
/// device memory alike.
struct MemoryNeed {
  int64_t pages = 0;
  int64_t summary = 0;
  int64_t tables = 0;
  int64_t staging = 0;
  int64_t projections = 0;
  int64_t scratch = 0;
  int64_t device = 0;  // on the device, beside pages, summary and projections
  int64_t pinned = 0;  // host memory that copies to and from the device go through
  int64_t timeline = 0;
  int64_t total() const {
    return pages + summary + tables + staging + projections + scratch + device + pinned + timeline;
  }
};

MemoryNeed memory_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t context);

}  // namespace kvswap
