#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace kvswap {

/// Where a byte stands: a file, and an offset in that file.
struct FilePlace {
  int fd = -1;
  int64_t offset_bytes = 0;
};

class MemoryFile;

enum class IoMode { kAuto, kDirect, kBuffered };

/// "auto", "direct" or "buffered"; nothing for another word.
std::optional<IoMode> parse_io_mode(std::string_view word);

struct DataFileOptions {
  std::string directory;            // must exist and be writable
  IoMode mode = IoMode::kAuto;      // kAuto: O_DIRECT if the file system takes it, else buffered
  int64_t quota_bytes = -1;         // most the file may occupy; -1: no limit but the disk's
  int64_t extend_bytes = 64 << 20;  // preallocation step
  bool is_wiped = false;            // what was written is overwritten with zeros at the end
};

/// The session's unnamed file: nothing of it is left in the directory, whatever ends the process.
///
/// Opened with O_TMPFILE (mode 0600); where the file system refuses that, created and unlinked at
/// once. Space is preallocated in steps, since extending a file while reading it makes O_DIRECT
/// reads slow. O_DIRECT is proven by writing and reading back one block, because some file systems
/// refuse it only then; with kAuto the fall-back is buffered I/O whose pages are dropped from the
/// page cache, and `fallbacks()` says so in a sentence. So it does of a folder that keeps no secret
/// or is no disk: in memory, on the network, or writable by everybody without a sticky bit.
///
/// The space is free again when the destructor returns, unless it runs in a forked child. A file
/// that is wiped was overwritten in its place by then; where that failed, a line in the log says
/// so. What a disk keeps beside the places it shows (spare blocks of flash, snapshots) is not
/// reached.
///
/// Thread rules: write() by one thread at a time; reserve() by any thread, also during write();
/// readers use fd() from any thread.
class DataFile {
 public:
  static Result<std::unique_ptr<DataFile>> open(const DataFileOptions& options);
  virtual ~DataFile() = default;

  virtual int fd() const = 0;
  /// Where what is read at `offset_bytes` stands; differs only where several files are one.
  virtual FilePlace place_of(int64_t offset_bytes) const { return {fd(), offset_bytes}; }
  virtual bool is_direct() const = 0;
  /// Offsets, lengths and addresses of reads and writes are multiples of this (a power of two).
  virtual int64_t alignment_bytes() const = 0;
  virtual const std::string& directory() const = 0;
  virtual const std::vector<std::string>& fallbacks() const = 0;

  /// Makes sure that [0, size_bytes) is allocated; fails with kBudget over the quota and with
  /// kStorage (ENOSPC, naming the free bytes) on a full disk.
  virtual Status reserve(int64_t size_bytes) = 0;
  /// Writes the whole buffer, in however many system calls it takes; reserves what is not reserved.
  /// Once the disk has not taken what a buffered file was given, every call fails with kStorage.
  virtual Status write(int64_t offset_bytes, std::span<const std::byte> bytes) = 0;
  virtual int64_t allocated_bytes() const = 0;
  /// Buffered files only: drops what was written or read from the page cache. Else nothing. Needed
  /// only to be exact: write() and the readers drop what they left there every few MiB.
  virtual void drop_cached(int64_t offset_bytes, int64_t length_bytes) = 0;

  /// Nobody will read that range before it is written again. A file on disk keeps the space.
  virtual void discard(int64_t offset_bytes, int64_t length_bytes) {
    (void)offset_bytes, (void)length_bytes;
  }
  /// Where it is none on disk: what its bytes are read from.
  virtual const MemoryFile* memory() const { return nullptr; }

  /// Gives back what lies past `size_bytes`, and what was taken ahead of need.
  virtual Status shrink(int64_t size_bytes) = 0;
  /// The file has a name of its own now: its content stays when this is destroyed.
  virtual void keep() = 0;
};

/// Free bytes for this user on the file system of `directory`.
Result<int64_t> free_bytes(const std::string& directory);

}  // namespace kvswap
