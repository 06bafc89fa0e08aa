#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/read_batch.h"
#include "io/readers.h"

namespace kvswap {

/// What every reader of ours is beside the way it makes its reads: submitted batches, who waits for
/// them, what was counted, and one read from its first call to its last.
///
/// `mutex_` guards the table, `is_done` of its batches and the counters; who finishes a batch
/// notifies `done_`.
class BatchReader : public BlockReader {
 public:
  Status wait(Ticket ticket) final;
  bool is_done(Ticket ticket) final;
  ReaderCounters counters() const final;

 protected:
  BatchReader(const DataFile& file, const ReaderOptions& options);

  /// Reads on the calling thread until it is done or has failed; not kCallAgain.
  ReadProgress::Next read_whole(ReadProgress& read, ReaderCounters& counted) const;
  static void add(const ReaderCounters& counted, ReaderCounters& to);

  const DataFile& file_;
  const int64_t alignment_bytes_;
  const int64_t call_bytes_max_;
  Timeline* const timeline_;
  const WaitPolicy* const patience_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  ReadBatchTable batches_;
  ReaderCounters counters_;
};

}  // namespace kvswap
