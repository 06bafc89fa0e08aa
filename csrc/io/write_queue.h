#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "io/data_file.h"
#include "io/status.h"
#include "io/timeline.h"
#include "io/wait_policy.h"

namespace kvswap {

struct WriteQueueOptions {
  int64_t buffer_bytes = 4 << 20;  // size of one staging buffer
  int buffers = 3;                 // how many; the bound on what prefill keeps in flight
  bool is_wiped = false;           // the staging buffers are zeros before they are given back
  bool is_within_calls = false;    // submit() writes; there is no thread
  Timeline* timeline = nullptr;    // is notified of each write; outlives the queue; null: nobody
  const WaitPolicy* patience = nullptr;  // outlives the queue; null: its defaults
};

/// Writes behind: one thread writes staging buffers to the file in the order they were handed in.
///
/// acquire() lends an empty aligned buffer and blocks while all are in flight, so a slow disk makes
/// the producer wait and memory never grows. submit() hands it over and returns its number; numbers
/// rise by one.
///
/// States: writing -> stopped -> writing. A write that fails (EIO, EAGAIN and EINTR: twice) stops
/// the queue, which keeps it and all that follow in their buffers: nothing is lost. The next
/// acquire() or wait() tries it again and goes on, or says why it cannot. forget() and drop() take
/// writes out that nobody will read.
///
/// Where no thread can be had, or is wanted, submit() writes. Waiting ends as `patience` says.
///
/// Thread rules: one producer thread. The destructor finishes the write under way and drops the
/// others. Not valid in a forked child.
class WriteQueue {
 public:
  /// A lent buffer; hand it back by submit() or give_back().
  struct Buffer {
    std::byte* data = nullptr;  // aligned to 4096
    int64_t capacity_bytes = 0;
    int index = -1;
  };

  static Result<std::unique_ptr<WriteQueue>> create(DataFile* file,
                                                    const WriteQueueOptions& options);
  virtual ~WriteQueue() = default;
  virtual Result<Buffer> acquire() = 0;
  virtual void give_back(Buffer buffer) = 0;
  /// Offset and length are multiples of the file's alignment. Also takes the buffer when it fails.
  virtual Result<uint64_t> submit(Buffer buffer, int64_t offset_bytes, int64_t length_bytes) = 0;
  /// All up to this number are in the file, or were dropped.
  virtual uint64_t written() const = 0;
  virtual Status wait(uint64_t number) = 0;
  /// Nobody will read what this number wrote: a queue that is stopped leaves it out. The newest
  /// come first, since without the oldest the queue goes on.
  virtual void drop(uint64_t number) = 0;
  /// The same for all that was submitted so far. The error is forgotten, too.
  virtual void forget() = 0;
  virtual int64_t resident_bytes() const = 0;
  /// All buffers, one after the other by their index: for a device that must know host memory.
  virtual std::span<std::byte> memory() const = 0;
  /// Bytes that were submitted, but those whose write failed and was dropped. What the thread has
  /// yet to write counts, so that a count does not depend on how far the thread is.
  virtual uint64_t bytes_written() const = 0;
  /// Seconds that acquire() made the producer wait.
  virtual double blocked_seconds() const = 0;
};

}  // namespace kvswap
