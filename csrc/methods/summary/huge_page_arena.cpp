#include "methods/summary/huge_page_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

namespace kvswap {
namespace {

constexpr int64_t kMemoryPage = 4096;
constexpr int64_t kLargePage = int64_t{2} << 20;
// Addresses alone, until they are written to. A region as large as what is there is soon used.
constexpr int64_t kRegionMax = 32 * kLargePage;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack

/// What of a piece is whole pages of this kernel: larger ones may hold a neighbour's ends.
void give_back(std::byte* piece, int64_t bytes) {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  const auto address = static_cast<int64_t>(std::bit_cast<uintptr_t>(piece));
  const int64_t first = (address + page - 1) / page * page - address;
  const int64_t last = (address + bytes) / page * page - address;
  if (last > first) (void)::madvise(piece + first, last - first, MADV_DONTNEED);
}

}  // namespace

HugePageArena::~HugePageArena() {
  for (const Region& region : regions_) ::munmap(region.mapped, region.mapped_bytes);
}

bool HugePageArena::add_region(int64_t bytes) {
  int64_t there = 0;
  for (const Region& region : regions_) there += region.live;
  const int64_t wanted = std::max(bytes, std::min(there, kRegionMax));
  Region region = {.bytes = (wanted + kLargePage - 1) / kLargePage * kLargePage};
  region.mapped_bytes = region.bytes + kLargePage;
  void* mapped = ::mmap(nullptr, region.mapped_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  region.mapped = static_cast<std::byte*>(mapped);
  const auto address = static_cast<int64_t>(std::bit_cast<uintptr_t>(mapped));
  region.first = region.mapped + (kLargePage - address % kLargePage) % kLargePage;
  regions_.push_back(region);
  return true;
}

/// The large pages that became whole since.
void HugePageArena::collapse(const Region& region, int64_t given_before) {
  const int64_t first = given_before / kLargePage * kLargePage;
  const int64_t last = region.given / kLargePage * kLargePage;
  if (last > first) (void)::madvise(region.first + first, last - first, kCollapse);
}

std::byte* HugePageArena::take(int64_t bytes) {
  if (bytes <= 0 || bytes % kMemoryPage != 0) return nullptr;
  const std::lock_guard lock(mutex_);
  if (regions_.empty() || regions_.back().given + bytes > regions_.back().bytes) {
    if (!add_region(bytes)) return nullptr;
  }
  Region& region = regions_.back();
  std::byte* piece = region.first + region.given;
  region.given += bytes;
  region.live += bytes;
  collapse(region, region.given - bytes);
  return piece;
}

bool HugePageArena::let_go(std::byte* piece, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(regions_, [&](const Region& region) {
    return piece >= region.first && piece < region.first + region.bytes;
  });
  if (found == regions_.end()) return false;
  found->live -= bytes;
  if (found->live > 0) {
    give_back(piece, bytes);
  } else {
    ::munmap(found->mapped, found->mapped_bytes);
    regions_.erase(found);
  }
  return true;
}

}  // namespace kvswap
