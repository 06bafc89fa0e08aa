#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "io/mapped_memory.h"
#include "io/status.h"

namespace kvswap {

/// Fills `target` from that offset of an open file. kStorage where it cannot be read, kCorrupt
/// where the file ends before; `name` is the file's, in messages.
Status read_exactly(int fd, int64_t offset_bytes, std::span<std::byte> target,
                    const std::string& name);

/// Bytes of a file, read into memory of their own.
///
/// No mapping of it: a disk that fails, or a file that is cut meanwhile, is an error here and would
/// be a signal there. Thread rules: const after reading, any thread.
class FileBytes {
 public:
  struct Range {
    int64_t offset_bytes = 0;
    int64_t length_bytes = 0;
  };
  /// As read_exactly(); kStorage also where the system has no memory for them.
  static Result<FileBytes> read(int fd, const Range& range, const std::string& name);

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::unique_ptr<MappedMemory> memory_;  // null: of no bytes
  std::span<const std::byte> bytes_;
};

}  // namespace kvswap
