#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/read_progress.h"
#include "io/timeline.h"

namespace kvswap {

/// A submitted batch in the reader's own memory.
struct ReadBatch {
  Ticket ticket = 0;
  std::vector<iovec> targets;
  std::vector<ReadProgress> reads;
  size_t next = 0;     // first read that was not started
  size_t started = 0;  // started and not finished
  Status status;
  bool is_done = false;  // what wait() looks at
  // For a wait that takes too long: when the last read of it ended, and what it is about.
  std::atomic<int64_t> progressed_ns = 0;
  size_t reads_asked = 0;
  int64_t bytes = 0;
  int64_t first_offset_bytes = 0;

  /// Keeps the first failure; reads that were not started are left out.
  void fail(Status failure);
  /// One read of it has ended, well or not.
  void ended();
  bool has_unstarted() const { return next < reads.size(); }
  std::string describe(const std::string& directory) const;
  bool is_finished() const { return started == 0 && !has_unstarted(); }
};

/// The batches that were submitted and not yet waited for. Memory of batches that are through is
/// used again, so a steady state allocates nothing. No locks: the reader has one.
class ReadBatchTable {
 public:
  ReadBatch& add(std::span<const BlockRead> reads);
  ReadBatch* find(Ticket ticket);
  /// Takes the finished batch out and returns its status.
  Status take(Ticket ticket);
  std::span<const std::unique_ptr<ReadBatch>> live() const { return live_; }

 private:
  std::vector<std::unique_ptr<ReadBatch>> live_;
  std::vector<std::unique_ptr<ReadBatch>> free_;
  Ticket last_ticket_ = 0;
};

/// A read that is about to start, for a timeline.
inline Span span_of_read(Ticket ticket, const ReadProgress& read) {
  return {.kind = SpanKind::kRead, .ticket = ticket, .bytes = read.missing_bytes()};
}

/// Refuses what the kernel would refuse, before anything is started.
Status check_reads(const DataFile& file, std::span<const BlockRead> reads);

}  // namespace kvswap
