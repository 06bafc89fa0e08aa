#include "io/pooled_memory.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace kvswap {
namespace {

constexpr std::pmr::pool_options kPools = {.max_blocks_per_chunk = 128,
                                           .largest_required_pool_block = 512};

class SystemMemory final : public std::pmr::memory_resource {
  void* do_allocate(size_t bytes, size_t) override {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
  }
  void do_deallocate(void* memory, size_t bytes, size_t) override { ::munmap(memory, bytes); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

SystemMemory& system_memory() {
  static SystemMemory memory;
  return memory;
}

// Not std::pmr::synchronized_pool_resource: libstdc++ gives every thread pools of its own, which
// the thread's end hands back to the resource. A thread whose work is done may end after the
// resource is freed, and would then write into freed memory.
class PooledMemory final : public std::pmr::memory_resource {
  void* do_allocate(size_t bytes, size_t alignment) override {
    const std::lock_guard lock(mutex_);
    return pools_.allocate(bytes, alignment);
  }
  void do_deallocate(void* memory, size_t bytes, size_t alignment) override {
    const std::lock_guard lock(mutex_);
    pools_.deallocate(memory, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  std::mutex mutex_;
  std::pmr::unsynchronized_pool_resource pools_{kPools, &system_memory()};
};

}  // namespace

std::unique_ptr<std::pmr::memory_resource> make_pooled_memory() {
  return std::make_unique<PooledMemory>();
}

}  // namespace kvswap
