#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/status.h"

namespace kvswap {

/// Where pages live and how read bytes get there: the device seam.
///
/// A page holds one record in the byte order of the disk. A read lands at landing(page); publish()
/// makes landed pages visible to attention. On the CPU both are the page itself and nothing
/// happens; a device pool lends pinned host memory and publishes with one batched copy. On unified
/// memory the copy disappears: DirectPagePool is that case.
///
/// Page addresses are aligned to 4096 bytes where record_bytes is, else to its largest power of
/// two, and never move. Not thread-safe; a landing place belongs to the reader until its ticket is
/// done.
class PagePool {
 public:
  virtual ~PagePool() = default;
  virtual std::byte* page(int32_t index) = 0;
  /// Where a read of this page must land. Valid until publish() of the page.
  virtual std::byte* landing(int32_t index) = 0;
  virtual void publish(std::span<const int32_t> pages) = 0;
  virtual int64_t pages() const = 0;
  virtual int64_t resident_bytes() const = 0;
};

/// One aligned allocation of host memory; pages are attended where reads land.
Result<std::unique_ptr<PagePool>> make_direct_page_pool(int64_t pages, int64_t page_bytes);

/// The copying path without a device: reads land in separate memory and are copied to their pages.
Result<std::unique_ptr<PagePool>> make_staged_page_pool(int64_t pages, int64_t page_bytes);

/// Page-aligned anonymous memory, not shared with forked children; freed on destruction.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  static Result<AlignedBytes> allocate(int64_t bytes);
  AlignedBytes(AlignedBytes&& other) noexcept;
  AlignedBytes& operator=(AlignedBytes&& other) noexcept;
  ~AlignedBytes();
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  int owner_pid_ = 0;
};

}  // namespace kvswap
