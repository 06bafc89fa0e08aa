#pragma once

#include <liburing.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "io/data_file.h"
#include "io/read_progress.h"
#include "io/status.h"
#include "io/syscalls.h"

namespace kvswap {

/// A ring with the file it reads and an eventfd that wakes the thread that waits in it.
///
/// Thread rules: everything by the one thread that called open(), except wake().
class UringRing {
 public:
  static constexpr uint64_t kWakeTag = ~uint64_t{0};

  UringRing() = default;
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  /// Room for `depth` reads in flight.
  Status open(int fd, int depth);
  /// Releases the file, now and not some time after the ring is gone. Nothing is in flight.
  void close();

  /// Queues a read of `place`; the kernel sees it at the next submit_and_wait() at the latest.
  void prepare_read(const ReadProgress::Call& call, const FilePlace& place, uint64_t tag);

  /// Hands over what is queued and waits until something completed or wake() was called.
  ///
  /// An error is for good: the ring is of no use any more, but for what it was handed before, which
  /// still completes.
  Status submit_and_wait();

  /// Calls of the system since this was last asked.
  uint64_t take_calls() { return std::exchange(calls_, 0); }

  /// Tags of queued reads that the kernel has not taken.
  std::vector<uint64_t> untaken() const;

  /// Calls `handle(tag, result)` for every completed read.
  template <typename Handle>
  void reap(Handle handle) {
    std::array<RingCompletion, 64> completed;
    size_t count = 0;
    do {
      count = static_cast<size_t>(syscalls().ring_reap(&ring_, completed));
      for (size_t i = 0; i < count; ++i) {
        if (completed[i].tag == kWakeTag) {
          wake_is_armed_ = false;
        } else {
          handle(completed[i].tag, completed[i].result);
        }
      }
    } while (count == completed.size());
  }

  /// From any thread.
  void wake() const;

 private:
  io_uring_sqe* next_entry();
  void arm_wake();
  int submit(unsigned completions);

  io_uring ring_{};
  bool is_open_ = false;
  int registered_fd_ = -1;  // of a file that outlives the ring; -1: none
  int wake_fd_ = -1;
  uint64_t wake_count_ = 0;  // where the kernel puts the eventfd's count
  bool wake_is_armed_ = false;
  unsigned prepared_ = 0;
  uint64_t calls_ = 0;
  int refusals_ = 0;  // in a row
};

}  // namespace kvswap
