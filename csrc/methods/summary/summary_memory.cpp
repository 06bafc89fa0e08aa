#include "methods/summary/summary_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "methods/summary/huge_page_arena.h"

namespace kvswap {

/// What was allocated at once. Freed with the last memory that holds it.
class SummaryMemory::Block {
 public:
  Block(std::shared_ptr<SummaryMemory> maker, std::byte* data, int64_t bytes)
      : maker_(std::move(maker)), data_(data), bytes_(bytes), holders_(&maker_->nodes()) {}
  ~Block() { maker_->let_go(data_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void add(SummaryMemory& holder) {
    const std::lock_guard lock(mutex_);
    holder.live_bytes_ += bytes_;
    if (!holders_.empty()) holder.shared_bytes_ += bytes_;
    holders_.push_back(&holder);
  }
  void remove(SummaryMemory& holder) {
    const std::lock_guard lock(mutex_);
    holder.live_bytes_ -= bytes_;
    const auto found = std::ranges::find(holders_, &holder);
    KVSWAP_ASSERT(found != holders_.end());
    const bool counts = found == holders_.begin();
    holders_.erase(found);
    if (!counts) holder.shared_bytes_ -= bytes_;
    if (counts && !holders_.empty()) holders_.front()->shared_bytes_ -= bytes_;
  }

 private:
  std::shared_ptr<SummaryMemory> maker_;
  std::byte* data_;
  int64_t bytes_;
  std::mutex mutex_;
  std::pmr::vector<SummaryMemory*> holders_;  // each keeps itself until it releases it; one counts
};

struct SummaryMemory::LetGo {
  std::shared_ptr<SummaryMemory> holder;
  std::shared_ptr<Block> block;
  void operator()(std::byte*) {
    block->remove(*holder);
    block.reset();
  }
};

std::shared_ptr<std::byte> SummaryMemory::hold(std::byte* data, std::shared_ptr<Block> block) {
  block->add(*this);
  return {data, LetGo{shared_from_this(), std::move(block)},
          NodeAllocator<std::byte>(shared_from_this())};
}

std::shared_ptr<std::byte> SummaryMemory::allocate(int64_t bytes) {
  return hold_new(take(bytes), bytes);
}

std::shared_ptr<std::byte> SummaryMemory::allocate_packed(int64_t bytes) {
  return hold_new(take_packed(bytes), bytes);
}

std::shared_ptr<std::byte> SummaryMemory::hold_new(std::byte* data, int64_t bytes) {
  if (data == nullptr) return nullptr;
  return hold(data, std::allocate_shared<Block>(NodeAllocator<Block>(shared_from_this()),
                                                shared_from_this(), data, bytes));
}

std::shared_ptr<std::byte> SummaryMemory::share(const std::shared_ptr<std::byte>& held) {
  const LetGo* other = std::get_deleter<LetGo>(held);
  KVSWAP_ASSERT(other != nullptr && other->holder.get() != this && is_shareable());
  return hold(held.get(), other->block);
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
  std::byte* take_packed(int64_t bytes) override { return packed_.take(bytes); }
  void let_go(std::byte* memory, int64_t bytes) override {
    if (!packed_.let_go(memory, bytes)) ::munmap(memory, bytes);
  }

 private:
  HugePageArena packed_{nodes()};
};

}  // namespace

std::shared_ptr<SummaryMemory> make_host_summary_memory() {
  return std::make_shared<HostSummaryMemory>();
}

}  // namespace kvswap
