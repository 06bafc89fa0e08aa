#include "methods/summary_memory.h"

#include <sys/mman.h>

#include <cstring>

namespace kvswap {

std::shared_ptr<std::byte> SummaryMemory::allocate(int64_t bytes) {
  std::byte* memory = take(bytes);
  if (memory == nullptr) return nullptr;
  live_bytes_ += bytes;
  const auto give_back = [self = shared_from_this(), bytes](std::byte* taken) {
    self->live_bytes_ -= bytes;
    self->let_go(taken, bytes);
  };
  return {memory, give_back, NodeAllocator<std::byte>(shared_from_this())};
}

namespace {

class HostSummaryMemory final : public SummaryMemory {
 public:
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void upload(std::byte* to, const void* host, int64_t bytes) override {
    std::memcpy(to, host, bytes);
  }
  Status download(void* host, const std::byte* from, int64_t bytes) override {
    std::memcpy(host, from, bytes);
    return Status::ok();
  }

 protected:
  /// From the kernel, not from the heap: summaries stay, and between the passing tensors of a
  /// prefill they would keep the heap from ever using those tensors' places again.
  std::byte* take(int64_t bytes) override {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  }
  void let_go(std::byte* memory, int64_t bytes) override { ::munmap(memory, bytes); }
};

}  // namespace

std::shared_ptr<SummaryMemory> make_host_summary_memory() {
  return std::make_shared<HostSummaryMemory>();
}

}  // namespace kvswap
