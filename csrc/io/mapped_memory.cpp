#include "io/mapped_memory.h"

#include <string.h>
#include <sys/mman.h>

namespace kvswap {

MappedMemory::MappedMemory(int64_t bytes, bool is_wiped)
    : bytes_(static_cast<size_t>(bytes)), is_wiped_(is_wiped) {
  void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return;
  data_ = static_cast<std::byte*>(data);
  (void)::madvise(data_, bytes_, MADV_DONTFORK);
  (void)::madvise(data_, bytes_, MADV_DONTDUMP);
}

MappedMemory::~MappedMemory() {
  if (data_ == nullptr) return;
  if (is_wiped_) ::explicit_bzero(data_, bytes_);
  ::munmap(data_, bytes_);
}

}  // namespace kvswap
