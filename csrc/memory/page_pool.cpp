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

namespace {

class DirectPagePool final : public PagePool {
 public:
  DirectPagePool(AlignedBytes memory, int64_t pages, int64_t page_bytes)
      : memory_(std::move(memory)), pages_(pages), page_bytes_(page_bytes) {}

  std::byte* page(int32_t index) override {
    KVSWAP_ASSERT(index >= 0 && index < pages_);
    return memory_.data() + index * page_bytes_;
  }
  std::byte* landing(int32_t index) override { return page(index); }
  void publish(std::span<const int32_t>) override {}
  int64_t pages() const override { return pages_; }
  int64_t resident_bytes() const override { return memory_.size(); }

 private:
  AlignedBytes memory_;
  int64_t pages_;
  int64_t page_bytes_;
};

class StagedPagePool final : public PagePool {
 public:
  StagedPagePool(AlignedBytes memory, AlignedBytes staging, int64_t pages, int64_t page_bytes)
      : direct_(std::move(memory), pages, page_bytes),
        staging_(std::move(staging)),
        page_bytes_(page_bytes) {}

  std::byte* page(int32_t index) override { return direct_.page(index); }
  std::byte* landing(int32_t index) override {
    KVSWAP_ASSERT(index >= 0 && index < direct_.pages());
    return staging_.data() + index * page_bytes_;
  }
  void publish(std::span<const int32_t> pages) override {
    for (const int32_t index : pages) {
      std::memcpy(direct_.page(index), landing(index), page_bytes_);
    }
  }
  int64_t pages() const override { return direct_.pages(); }
  int64_t resident_bytes() const override { return direct_.resident_bytes() + staging_.size(); }

 private:
  DirectPagePool direct_;
  AlignedBytes staging_;
  int64_t page_bytes_;
};

}  // namespace

Result<std::unique_ptr<PagePool>> make_direct_page_pool(int64_t pages, int64_t page_bytes) {
  auto memory = AlignedBytes::allocate(pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  return std::unique_ptr<PagePool>(
      std::make_unique<DirectPagePool>(std::move(memory.value()), pages, page_bytes));
}

Result<std::unique_ptr<PagePool>> make_staged_page_pool(int64_t pages, int64_t page_bytes) {
  auto memory = AlignedBytes::allocate(pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  auto staging = AlignedBytes::allocate(pages * page_bytes);
  if (!staging.is_ok()) return staging.status();
  return std::unique_ptr<PagePool>(std::make_unique<StagedPagePool>(
      std::move(memory.value()), std::move(staging.value()), pages, page_bytes));
}

}  // namespace kvswap
