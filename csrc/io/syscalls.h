#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

struct io_uring;

namespace kvswap {

/// A completed entry of a ring: the tag it was queued with, and bytes or minus errno.
struct RingCompletion {
  uint64_t tag = 0;
  int result = 0;
};

/// The system calls that files and readers make, one function each.
///
/// Every function returns what the call returns, or minus errno. The default is Linux itself; tests
/// put errors, delays and short counts here, below all that is ours. Thread-safe.
class Syscalls {
 public:
  virtual ~Syscalls() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int fallocate(int fd, int mode, int64_t offset_bytes, int64_t length_bytes);
  virtual int ftruncate(int fd, int64_t size_bytes);
  virtual int fsync(int fd);
  /// Waits until what was written to that part of the file is on the disk; length 0: to its end.
  virtual int write_back(int fd, int64_t offset_bytes, int64_t length_bytes);
  /// Gives a file without a name one, in the folder `folder`.
  virtual int name_file(int fd, int folder, const char* name);
  /// Relative to the folder `folder`; flags: RENAME_NOREPLACE, RENAME_EXCHANGE.
  virtual int rename(int folder, const char* from, const char* to, unsigned flags);
  virtual int make_folder(int parent, const char* name, mode_t mode);
  virtual int open_at(int folder, const char* name, int flags, mode_t mode);
  virtual int facts(int fd, struct stat* facts);
  /// Of a name in the folder `folder`, or of a path from AT_FDCWD; flags: AT_SYMLINK_NOFOLLOW.
  virtual int facts_at(int folder, const char* name, struct stat* facts, int flags);
  virtual int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes);
  virtual int64_t preadv(int fd, const iovec* targets, int count, int64_t offset_bytes);
  virtual int ring_setup(unsigned entries, io_uring* ring, unsigned flags);
  /// Hands queued entries over and waits for `completions` of those in flight.
  virtual int ring_submit(io_uring* ring, unsigned completions);
  /// Takes what has completed, in any order; returns how many.
  virtual int ring_reap(io_uring* ring, std::span<RingCompletion> completions);
};

/// The one in use.
Syscalls& syscalls();

/// For tests, while no session is open: null gives Linux itself back.
void use_syscalls(Syscalls* syscalls);

}  // namespace kvswap
