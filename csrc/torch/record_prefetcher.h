#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/readers.h"
#include "io/status.h"

namespace kvswap {

struct PrefetcherOptions {
  std::string path;
  int64_t record_bytes = 0;  // of each record; record i begins at first_byte + i * record_bytes
  int64_t first_byte = 0;
  ReaderKind reader = ReaderKind::kAuto;
  IoMode mode = IoMode::kAuto;
  int depth = 64;
};

/// Reads records of a file in batches, without a cache: what prefetch_open() and its siblings are.
///
/// States of a ticket: submit() -> in flight -> wait() -> read. In flight the memory is the
/// reader's. wait() gives the bytes away without a copy. A ticket that was waited for may be waited
/// for again: its records are read again, so that tracing, which may repeat a call, changes
/// nothing. The newest kTicketsMax tickets are remembered.
///
/// Errors: a Status that is_pending() leaves the ticket in flight.
/// Thread rules: any thread; calls are one after the other. The destructor waits for what is in
/// flight.
class RecordPrefetcher {
 public:
  static constexpr size_t kInFlightMax = 64;
  static constexpr size_t kTicketsMax = 1024;

  static Result<std::unique_ptr<RecordPrefetcher>> open(const PrefetcherOptions& options);

  int64_t records() const { return records_; }
  int64_t record_bytes() const { return options_.record_bytes; }
  bool is_direct() const { return file_->is_direct(); }

  /// records: [count] of the file, in any order, repeats allowed.
  Result<int64_t> submit(const std::vector<int64_t>& records);
  /// [count * record_bytes] uint8.
  Result<at::Tensor> wait(int64_t ticket);
  /// Records of a ticket; an error for one that was never given out, or is forgotten.
  Result<int64_t> count_of(int64_t ticket);

 private:
  struct Batch {
    std::vector<int64_t> records;
    at::Tensor bytes;   // undefined: given away
    Ticket ticket = 0;  // of the reader; 0: not in flight
  };

  RecordPrefetcher(PrefetcherOptions options, std::unique_ptr<DataFile> file, int64_t records);

  Status begin(Batch& batch);
  void forget_oldest();
  Result<Batch*> find(int64_t ticket);

  const PrefetcherOptions options_;
  const std::unique_ptr<DataFile> file_;
  const int64_t records_;
  std::mutex mutex_;
  int64_t next_ticket_ = 1;
  size_t in_flight_ = 0;
  std::map<int64_t, Batch> batches_;  // before the reader: it writes to them until it is destroyed
  std::unique_ptr<BlockReader> reader_;
};

}  // namespace kvswap
