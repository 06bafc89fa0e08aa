#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "io/status.h"

namespace kvswap {

/// One contiguous range of a file, scattered over one or more targets.
///
/// `offset_bytes`, every target's address and length are multiples of the file's alignment when
/// the file is opened with O_DIRECT. The iovec array is copied by submit(); the targets are not.
struct BlockRead {
  int64_t offset_bytes = 0;
  std::span<const iovec> targets;  // in file order; at most kTargetsMax
};

inline constexpr int kTargetsMax = 256;

/// Names one submitted batch. Tickets rise; 0 is no ticket.
using Ticket = uint64_t;

struct ReaderCounters {
  uint64_t batches = 0;
  uint64_t reads = 0;    // system-level reads, after merging, short reads' rests included
  uint64_t bytes = 0;    // bytes that arrived
  uint64_t retries = 0;  // reads submitted again after a transient error or a short read
  uint64_t calls = 0;  // of the system: a ring takes several reads with one, and waits with others
};

/// Reads blocks in batches.
///
/// States of a batch: submit() -> in flight -> wait(ticket) -> done. Several may be in flight, and
/// may be waited for in any order, each exactly once.
///   - in flight: every target belongs to the reader. Do not read or free it.
///   - done: every target is full, or the Status says which read failed (path, offset, errno).
/// A short read is resubmitted by the reader; a read past the end of the file is an error.
/// Transient errors (EINTR, EAGAIN) are retried, EIO once. The destructor waits for what is in
/// flight, and leaves out what was not begun. A Status of wait() that is_pending() leaves the batch
/// in flight: its targets stay the reader's, and its ticket is waited for again.
///
/// Thread rules: submit() and wait() are called by one thread at a time. Two readers may share one
/// file. Not valid in a forked child.
class BlockReader {
 public:
  virtual ~BlockReader() = default;
  virtual Result<Ticket> submit(std::span<const BlockRead> reads) = 0;
  virtual Status wait(Ticket ticket) = 0;
  /// True when wait(ticket) would return at once.
  virtual bool is_done(Ticket ticket) = 0;
  virtual ReaderCounters counters() const = 0;
  /// "uring", "threads", "sync", "memory", or these under a wrapper: "nvme(uring)".
  virtual std::string name() const = 0;
};

}  // namespace kvswap
