#include "memory/page_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kvswap {

Result<AlignedBytes> AlignedBytes::allocate(int64_t bytes) {
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
  return memory;
}

AlignedBytes::AlignedBytes(AlignedBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      owner_pid_(other.owner_pid_) {}

AlignedBytes& AlignedBytes::operator=(AlignedBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_pid_, other.owner_pid_);
  return *this;
}

AlignedBytes::~AlignedBytes() {
  // A forked child never had this memory; what stands at the address there is somebody else's.
  if (data_ != nullptr && getpid() == owner_pid_) munmap(data_, size_);
}

Result<PagePool> make_host_page_pool(int64_t pages, int64_t page_bytes) {
  auto memory = AlignedBytes::allocate(pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  // Pages are small and met in any order: huge ones under them save the look-ups of addresses.
  if (pages > 0) madvise(memory.value().data(), memory.value().size(), MADV_HUGEPAGE);
  const auto owner = std::make_shared<AlignedBytes>(std::move(memory.value()));
  return PagePool(std::shared_ptr<std::byte>(owner, owner->data()), pages, page_bytes);
}

}  // namespace kvswap
