#pragma once

#include <liburing.h>

#include <cstdint>

#include "io/read_progress.h"
#include "io/status.h"

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

  /// Queues a read; the kernel sees it at the next submit_and_wait() at the latest.
  void prepare_read(const ReadProgress::Call& call, uint64_t tag);

  /// Hands over what is queued and waits until something completed or wake() was called.
  void submit_and_wait();

  /// Calls `handle(tag, result)` for every completed read.
  template <typename Handle>
  void reap(Handle handle) {
    io_uring_cqe* completion = nullptr;
    unsigned head = 0;
    unsigned count = 0;
    io_uring_for_each_cqe(&ring_, head, completion) {
      ++count;
      if (completion->user_data == kWakeTag) {
        wake_is_armed_ = false;
      } else {
        handle(completion->user_data, completion->res);
      }
    }
    io_uring_cq_advance(&ring_, count);
  }

  /// From any thread.
  void wake() const;

 private:
  io_uring_sqe* next_entry();
  void arm_wake();

  io_uring ring_{};
  bool is_open_ = false;
  int file_ = -1;
  bool file_is_registered_ = false;
  int wake_fd_ = -1;
  uint64_t wake_count_ = 0;  // where the kernel puts the eventfd's count
  bool wake_is_armed_ = false;
  unsigned prepared_ = 0;
};

}  // namespace kvswap
