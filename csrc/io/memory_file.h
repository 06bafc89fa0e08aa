#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/data_file.h"
#include "io/mapped_memory.h"

namespace kvswap {

/// What stands in a session's file where there is none: memory that holds what was written until it
/// is discarded. No file is opened, and no disk is needed.
///
/// Memory is taken in blocks when something is first written there, and goes back to the kernel
/// when nothing of a block is held any more. Read by read() or the reader that open_reader() makes.
/// Not thread-safe.
class MemoryFile final : public DataFile {
 public:
  static constexpr int64_t kAlignment = 512;        // of offsets and lengths, as on most disks
  static constexpr int64_t kBlockBytes = 64 << 10;  // what is taken and given back at once

  /// is_wiped: blocks are zeros before they go back.
  explicit MemoryFile(bool is_wiped = false) : is_wiped_(is_wiped) {}

  int fd() const override { return -1; }
  bool is_direct() const override { return true; }  // nothing of it is in the page cache
  int64_t alignment_bytes() const override { return kAlignment; }
  const std::string& directory() const override { return directory_; }
  const std::vector<std::string>& fallbacks() const override { return fallbacks_; }
  Status reserve(int64_t size_bytes) override;
  /// Fails with kBudget where the system has no memory left.
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override;
  /// Of blocks that something is held in.
  int64_t allocated_bytes() const override { return blocks_held_ * kBlockBytes; }
  void drop_cached(int64_t, int64_t) override {}
  void discard(int64_t offset_bytes, int64_t length_bytes) override;
  const MemoryFile* memory() const override { return this; }
  Status shrink(int64_t size_bytes) override;
  void keep() override {}

  /// Copies what was written there; false where some of it is not held.
  bool read(int64_t offset_bytes, std::span<std::byte> target) const;

 private:
  struct Block {
    std::unique_ptr<MappedMemory> memory;           // null: nothing is held
    std::bitset<kBlockBytes / kAlignment> is_held;  // by what one read is aligned to
  };
  /// The part of a range that stands in one block.
  struct Piece {
    int64_t block = 0;
    int64_t offset_bytes = 0;  // in the block
    int64_t length_bytes = 0;
  };
  static Piece first_piece(int64_t offset_bytes, int64_t length_bytes);

  bool is_wiped_;
  int64_t blocks_held_ = 0;
  std::vector<Block> blocks_;
  std::string directory_;               // none
  std::vector<std::string> fallbacks_;  // none
};

}  // namespace kvswap
