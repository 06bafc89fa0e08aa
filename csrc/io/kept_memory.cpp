#include "io/kept_memory.h"

#include <sys/mman.h>

#include <new>

namespace kvswap {
namespace {

constexpr std::pmr::pool_options kPools = {.max_blocks_per_chunk = 128,
                                           .largest_required_pool_block = 512};

class Kernel final : public std::pmr::memory_resource {
  void* do_allocate(size_t bytes, size_t) override {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
  }
  void do_deallocate(void* memory, size_t bytes, size_t) override { ::munmap(memory, bytes); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace

std::unique_ptr<std::pmr::memory_resource> make_kept_memory() {
  static Kernel kernel;
  return std::make_unique<std::pmr::synchronized_pool_resource>(kPools, &kernel);
}

}  // namespace kvswap
