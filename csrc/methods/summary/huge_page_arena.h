#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <vector>

namespace kvswap {

/// Memory from the kernel for pieces that stay where they are, one behind the other, so that they
/// stand in the processor's large pages: what is read in one sweep is then read without a walk of
/// page tables every 4 KiB, which costs as much as the reading.
///
/// A large page is made when all of it has been given out (MADV_COLLAPSE; a kernel that has none,
/// or no memory in one piece, leaves small ones), never before: no more is resident than pieces.
/// Freed pieces go back at once; their addresses with the last piece of a region. Thread-safe.
class HugePageArena {
 public:
  explicit HugePageArena(std::pmr::memory_resource& nodes) : regions_(&nodes) {}
  ~HugePageArena();
  HugePageArena(const HugePageArena&) = delete;
  HugePageArena& operator=(const HugePageArena&) = delete;

  /// `bytes`: whole memory pages, else null; null too where there is no more.
  std::byte* take(int64_t bytes);
  /// False: not one of these pieces.
  bool let_go(std::byte* piece, int64_t bytes);

 private:
  struct Region {
    std::byte* mapped = nullptr;
    int64_t mapped_bytes = 0;
    std::byte* first = nullptr;  // at a large page
    int64_t bytes = 0;           // whole large pages
    int64_t given = 0;           // from `first` on
    int64_t live = 0;
  };
  bool add_region(int64_t bytes);
  static void collapse(const Region& region, int64_t given_before);

  std::mutex mutex_;
  std::pmr::vector<Region> regions_;  // the last is given out
};

}  // namespace kvswap
