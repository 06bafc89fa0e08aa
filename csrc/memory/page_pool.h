#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "io/status.h"

namespace kvswap {

/// What memory holds when it is given back.
enum class AtEnd { kLeft, kWiped };

/// Page-aligned anonymous memory that neither forked children nor core dumps get; freed on
/// destruction.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  static Result<AlignedBytes> allocate(int64_t bytes, AtEnd at_end = AtEnd::kLeft);
  AlignedBytes(AlignedBytes&& other) noexcept;
  AlignedBytes& operator=(AlignedBytes&& other) noexcept;
  ~AlignedBytes();
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  int owner_pid_ = 0;
  AtEnd at_end_ = AtEnd::kLeft;
};

/// The same, owned in common: what is in flight there may outlive who asked for it.
Result<std::shared_ptr<std::byte>> share_aligned_bytes(int64_t bytes, AtEnd at_end = AtEnd::kLeft);

/// Pages of one size in one piece of memory, the host's or a device's.
///
/// A page holds one record in the byte order of the disk. How bytes get there, and who computes on
/// them, is engine/page_space.h's. Page addresses are aligned to 4096 bytes where the memory and
/// record_bytes are, else to the latter's largest power of two, and never move. Not thread-safe.
class PagePool {
 public:
  /// `memory`: [pages, page_bytes], freed with the pool.
  PagePool(std::shared_ptr<std::byte> memory, int64_t pages, int64_t page_bytes)
      : memory_(std::move(memory)), pages_(pages), page_bytes_(page_bytes) {}

  std::byte* page(int32_t index) const {
    KVSWAP_ASSERT(index >= 0 && index < pages_);
    return memory_.get() + index * page_bytes_;
  }
  int64_t pages() const { return pages_; }
  const std::shared_ptr<std::byte>& memory() const { return memory_; }
  int64_t resident_bytes() const { return pages_ * page_bytes_; }

 private:
  std::shared_ptr<std::byte> memory_;
  int64_t pages_;
  int64_t page_bytes_;
};

/// One aligned allocation of host memory; pages are attended where reads land.
Result<PagePool> make_host_page_pool(int64_t pages, int64_t page_bytes,
                                     AtEnd at_end = AtEnd::kLeft);

}  // namespace kvswap
