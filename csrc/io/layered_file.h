#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/data_file.h"

namespace kvswap {

/// The files that a session's records stand in, as one: those of what it continues, which nobody
/// writes any more, and above them its own.
///
/// Each file has a range of offsets, and between two ranges lies more than reads are merged over,
/// so that no read spans two files. write() and reserve() are the own file's. Files stay open until
/// the stack is destroyed, and may be shared by several.
///
/// Thread rules: as DataFile; seal() while nothing is being written.
class LayeredFile final : public DataFile {
 public:
  /// A file and the offset of its first byte.
  struct Part {
    std::shared_ptr<DataFile> file;
    int64_t begin_bytes = 0;
  };
  static constexpr int kFilesMax = 64;
  static constexpr int64_t kGapBytes = int64_t{32} << 20;  // above any merge_gap_bytes

  /// below: rising. `own` begins where own_begin_bytes says, past all of them.
  LayeredFile(std::vector<Part> below, std::shared_ptr<DataFile> own, int64_t own_begin_bytes);

  /// The own file is written no more; `next` is what is written from now on, at next_begin_bytes.
  void seal(std::shared_ptr<DataFile> next, int64_t next_begin_bytes);
  bool is_full() const { return count_ == kFilesMax; }
  /// The first offset that a file may have above `end_bytes`, for records of that size.
  static int64_t begin_above(int64_t end_bytes, int64_t record_bytes);

  int64_t own_begin_bytes() const { return own().begin_bytes; }
  /// All files, the own one last.
  std::vector<Part> parts() const;

  FilePlace place_of(int64_t offset_bytes) const override;
  const std::string& directory_of(int64_t offset_bytes) const {
    return part_at(offset_bytes).file->directory();
  }
  int fd() const override { return own().file->fd(); }
  bool is_direct() const override { return own().file->is_direct(); }
  int64_t alignment_bytes() const override { return own().file->alignment_bytes(); }
  const std::string& directory() const override { return own().file->directory(); }
  const std::vector<std::string>& fallbacks() const override { return own().file->fallbacks(); }
  Status reserve(int64_t size_bytes) override;
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override;
  /// Of the own file.
  int64_t allocated_bytes() const override { return own().file->allocated_bytes(); }
  void drop_cached(int64_t offset_bytes, int64_t length_bytes) override;
  /// Of the own file.
  void discard(int64_t offset_bytes, int64_t length_bytes) override;
  const MemoryFile* memory() const override { return own().file->memory(); }
  Status shrink(int64_t size_bytes) override;
  void keep() override { own().file->keep(); }

 private:
  const Part& own() const { return parts_[count_.load(std::memory_order_acquire) - 1]; }
  const Part& part_at(int64_t offset_bytes) const;

  std::array<Part, kFilesMax> parts_;  // what is below count_ never changes
  std::atomic<int> count_ = 0;
};

}  // namespace kvswap
