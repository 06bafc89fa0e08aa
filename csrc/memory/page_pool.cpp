#include "memory/page_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kvswap {

Result<AlignedBytes> AlignedBytes::allocate(int64_t bytes, AtEnd at_end) {
  AlignedBytes memory;
  if (bytes == 0) return memory;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status::budget("page pool: the system must lend " + std::to_string(bytes) +
                          " bytes, got: " + std::strerror(errno));
  }
  madvise(data, bytes, MADV_DONTFORK);
  madvise(data, bytes, MADV_DONTDUMP);
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = bytes;
  memory.owner_pid_ = getpid();
  memory.at_end_ = at_end;
  return memory;
}

AlignedBytes::AlignedBytes(AlignedBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      owner_pid_(other.owner_pid_),
      at_end_(other.at_end_) {}

AlignedBytes& AlignedBytes::operator=(AlignedBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_pid_, other.owner_pid_);
  std::swap(at_end_, other.at_end_);
  return *this;
}

AlignedBytes::~AlignedBytes() {
  // A forked child never had this memory; what stands at the address there is somebody else's.
  if (data_ == nullptr || getpid() != owner_pid_) return;
  if (at_end_ == AtEnd::kWiped) explicit_bzero(data_, size_);
  munmap(data_, size_);
}

Result<std::shared_ptr<std::byte>> share_aligned_bytes(int64_t bytes, AtEnd at_end) {
  auto memory = AlignedBytes::allocate(bytes, at_end);
  if (!memory.is_ok()) return memory.status();
  const auto owner = std::make_shared<AlignedBytes>(std::move(memory.value()));
  return std::shared_ptr<std::byte>(owner, owner->data());
}

Result<PagePool> make_host_page_pool(int64_t pages, int64_t page_bytes, AtEnd at_end) {
  auto memory = share_aligned_bytes(pages * page_bytes, at_end);
  if (!memory.is_ok()) return memory.status();
  // Pages are small and met in any order: huge ones under them save the look-ups of addresses.
  if (pages > 0) madvise(memory.value().get(), pages * page_bytes, MADV_HUGEPAGE);
  return PagePool(std::move(memory.value()), pages, page_bytes);
}

}  // namespace kvswap
