#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "io/write_queue.h"
#include "store/record_registry.h"

namespace kvswap {

/// Records on their way to the file: which of them each write holds, so that who reads one waits
/// for its write alone, and a write that nobody will read is dropped. Not thread-safe.
class RecordWrites {
 public:
  /// records outlives it.
  RecordWrites(std::unique_ptr<WriteQueue> queue, const RecordRegistry& records)
      : queue_(std::move(queue)), records_(records) {}

  /// What lends the buffers, and counts.
  WriteQueue& queue() { return *queue_; }
  const WriteQueue& queue() const { return *queue_; }
  /// A record as it is written: in its place as long as the serial is the same.
  struct Written {
    uint32_t number = 0;
    uint32_t serial = 0;
  };
  /// Those, neighbours from offset_bytes on; also takes the buffer when it fails.
  Status submit(WriteQueue::Buffer buffer, int64_t offset_bytes, int64_t length_bytes,
                std::vector<Written> records);
  /// Waits until what stands at this offset is in the file.
  Status wait_for(int64_t offset_bytes);
  /// Waits for all of them.
  Status flush();
  /// Drops writes that are not done and whose records nobody holds any more: so what failed of
  /// them.
  void drop_unread();
  /// For a store that is about to close: nobody will read what is not written yet.
  void forget();

 private:
  struct PendingWrite {
    uint64_t number = 0;
    int64_t begin_bytes = 0;
    int64_t end_bytes = 0;
    std::vector<Written> records;
  };
  void forget_written();

  std::unique_ptr<WriteQueue> queue_;
  const RecordRegistry& records_;
  std::deque<PendingWrite> pending_;
  uint64_t last_write_ = 0;
};

}  // namespace kvswap
