#include "device_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace fake_cuda {
namespace {

constexpr int64_t kRangeBytes = int64_t{1} << 36;
constexpr int64_t kAlignment = 256;
constexpr int kNothingThere = 0x7e;  // nothing that would pass for a result

#if defined(__SANITIZE_THREAD__)
constexpr bool kIsAlwaysOpen = true;
#else
constexpr bool kIsAlwaysOpen = false;
#endif

thread_local int running_here = 0;

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void stop(const std::string& what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
  std::abort();
}

DeviceMemory& DeviceMemory::get() {
  static DeviceMemory& memory = *new DeviceMemory();  // kernels may run until the process ends
  return memory;
}

DeviceMemory::DeviceMemory() : page_bytes_(sysconf(_SC_PAGESIZE)) {
  fd_ = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (fd_ < 0 || ftruncate(fd_, kRangeBytes) != 0) stop("the system gives no memory file");
  const auto map = [this](int protection) {
    void* view = mmap(nullptr, kRangeBytes, protection, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (view == MAP_FAILED) stop("the system gives no range of addresses");
    (void)madvise(view, kRangeBytes, MADV_DONTDUMP);
    return static_cast<std::byte*>(view);
  };
  view_ = map(PROT_NONE);
  copies_ = kIsAlwaysOpen ? view_ : map(PROT_READ | PROT_WRITE);

  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  action.sa_sigaction = [](int signal, siginfo_t* info, void* context) {
    on_fault(signal, info, context);
  };
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

std::byte* DeviceMemory::reserve(int64_t bytes, int64_t bytes_max) {
  const std::unique_lock lock(mutex_);
  if (given_bytes_ + bytes > bytes_max) return nullptr;
  const int64_t padded = round_up(bytes, kAlignment);
  used_bytes_ += round_up(padded, page_bytes_);
  std::byte* memory = view_ + used_bytes_ - padded;
  used_bytes_ += page_bytes_;  // the guard
  if (used_bytes_ > kRangeBytes) stop("its range of addresses is used up");
  given_bytes_ += padded;
  allocations_[memory] = {.bytes = padded};
  return memory;
}

bool DeviceMemory::give_back(const void* memory) {
  const std::unique_lock lock(mutex_);
  const auto found = allocations_.find(static_cast<const std::byte*>(memory));
  if (found == allocations_.end() || found->second.is_given_back) return false;
  found->second.is_given_back = true;
  return true;
}

void DeviceMemory::appear(const void* memory) {
  const std::unique_lock lock(mutex_);
  auto& allocation = *allocations_.find(static_cast<const std::byte*>(memory));
  allocation.second.state = State::kThere;
  if (kIsAlwaysOpen || running_ > 0) protect(allocation, true);
  std::memset(copies_ + (allocation.first - view_), kNothingThere, allocation.second.bytes);
}

void DeviceMemory::vanish(const void* memory) {
  const std::unique_lock lock(mutex_);
  vanish(*allocations_.find(static_cast<const std::byte*>(memory)));
}

void DeviceMemory::vanish_all() {
  const std::unique_lock lock(mutex_);
  for (auto& allocation : allocations_) {
    allocation.second.is_given_back = true;
    if (allocation.second.state != State::kFreed) vanish(allocation);
  }
}

void DeviceMemory::vanish(Allocations::value_type& allocation) {
  protect(allocation, false);
  allocation.second.state = State::kFreed;
  given_bytes_ -= allocation.second.bytes;
  const int64_t begin = (allocation.first - view_) / page_bytes_ * page_bytes_;
  const int64_t end = allocation.first - view_ + allocation.second.bytes;
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
}

void DeviceMemory::protect(const Allocations::value_type& allocation, bool is_open) const {
  const int64_t begin = (allocation.first - view_) / page_bytes_ * page_bytes_;
  const int64_t end = allocation.first - view_ + allocation.second.bytes;
  const int protection = is_open ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (mprotect(view_ + begin, end - begin, protection) != 0) stop("mprotect() failed");
}

void DeviceMemory::open_all(bool is_open) const {
  for (const auto& allocation : allocations_) {
    if (allocation.second.state == State::kThere) protect(allocation, is_open);
  }
}

bool DeviceMemory::holds(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return byte >= view_ && byte < view_ + kRangeBytes;
}

const DeviceMemory::Allocations::value_type* DeviceMemory::find(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  auto found = allocations_.upper_bound(byte);
  if (found == allocations_.begin()) return nullptr;
  --found;
  return byte < found->first + found->second.bytes + page_bytes_ ? &*found : nullptr;
}

std::string DeviceMemory::describe(const void* address) const {
  const auto* allocation = find(address);
  if (allocation == nullptr) return "before an allocation, or of none";
  const int64_t at = static_cast<const std::byte*>(address) - allocation->first;
  const std::string place = "byte " + std::to_string(at) + " of an allocation of " +
                            std::to_string(allocation->second.bytes) + " that is ";
  if (at >= allocation->second.bytes) return place + "shorter";
  if (allocation->second.state == State::kFreed) return place + "freed";
  return place + (allocation->second.state == State::kThere ? "there" : "not there yet");
}

std::byte* DeviceMemory::reach(const void* address, int64_t bytes, const std::string& what) const {
  const std::shared_lock lock(mutex_);
  const auto* allocation = find(address);
  const auto* byte = static_cast<const std::byte*>(address);
  if (allocation == nullptr || allocation->second.state != State::kThere ||
      byte + bytes > allocation->first + allocation->second.bytes) {
    stop(what + " of " + std::to_string(bytes) + " bytes from " + describe(address));
  }
  return copies_ + (byte - view_);
}

int64_t DeviceMemory::allocations() const {
  const std::shared_lock lock(mutex_);
  int64_t count = 0;
  for (const auto& [memory, allocation] : allocations_) count += !allocation.is_given_back;
  return count;
}

DeviceMemory::Running::Running() {
  ++running_here;
  if (kIsAlwaysOpen) return;
  DeviceMemory& memory = get();
  const std::unique_lock lock(memory.mutex_);
  if (++memory.running_ == 1) memory.open_all(true);
}

DeviceMemory::Running::~Running() {
  --running_here;
  if (kIsAlwaysOpen) return;
  DeviceMemory& memory = get();
  const std::unique_lock lock(memory.mutex_);
  if (--memory.running_ == 0) memory.open_all(false);
}

/// The process ends here, so what a handler may not do else is done.
void DeviceMemory::on_fault(int signal, void* info, void*) {
  const void* address = static_cast<siginfo_t*>(info)->si_addr;
  const DeviceMemory& memory = get();
  if (memory.holds(address)) {
    const std::shared_lock lock(memory.mutex_, std::try_to_lock);
    std::fprintf(stderr, "fake CUDA: %s touches device memory: %s\n",
                 running_here > 0 ? "a kernel" : "the host",
                 lock.owns_lock() ? memory.describe(address).c_str() : "which is changing");
  }
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);
}

}  // namespace fake_cuda
