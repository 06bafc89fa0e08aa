#include "select/summary_memory.h"

#include <cstring>
#include <new>

namespace kvswap {

std::shared_ptr<std::byte> SummaryMemory::allocate(int64_t bytes) {
  std::byte* memory = take(bytes);
  if (memory == nullptr) return nullptr;
  live_bytes_ += bytes;
  return {memory, [self = shared_from_this(), bytes](std::byte* taken) {
            self->live_bytes_ -= bytes;
            self->let_go(taken, bytes);
          }};
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

 protected:
  std::byte* take(int64_t bytes) override {
    auto* memory = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
    if (memory != nullptr) std::memset(memory, 0, bytes);
    return memory;
  }
  void let_go(std::byte* memory, int64_t) override { ::operator delete(memory, kAlignment); }

 private:
  static constexpr std::align_val_t kAlignment{64};
};

}  // namespace

std::shared_ptr<SummaryMemory> make_host_summary_memory() {
  return std::make_shared<HostSummaryMemory>();
}

}  // namespace kvswap
