#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "io/syscalls.h"

namespace kvswap {

/// What a fault strikes. kRead: a preadv() and a completed read of a ring alike; kOpen: by a path,
/// or within a folder; kFacts: who asks what a file is.
enum class KernelCall { kOpen, kAllocate, kWrite, kRead, kRingSetup, kRingSubmit, kFacts };
inline constexpr int kKernelCalls = 7;
inline const char* call_name(KernelCall call) {
  constexpr const char* names[] = {"open",        "allocate",    "write", "read",
                                   "ring set-up", "ring submit", "facts"};
  return names[static_cast<int>(call)];
}

/// One kind of trouble: from the nth call of its kind on, counted from arm(), once or for ever.
struct KernelFault {
  KernelCall call = KernelCall::kRead;
  uint64_t nth = 1;
  bool is_lasting = false;
  int error_number = 0;   // 0: the call itself does what it does
  bool is_short = false;  // half of the bytes, in whole blocks
  int delay_us = 0;       // before the call, or before its completion is seen
  bool reorders = false;  // completions of a ring come newest first
  std::string name = "";  // only calls on files with this in their names; a ring's reads have none
};

/// Linux with faults: stands below the readers and files, which know nothing of it.
///
/// Deterministic for a caller with one thread: the same calls get the same faults. What was
/// injected is kept in log(). In use from its making to its end; one at a time.
class FaultyKernel final : public Syscalls {
 public:
  FaultyKernel() { use_syscalls(this); }
  ~FaultyKernel() override { use_syscalls(nullptr); }

  void arm(const KernelFault& fault) {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    is_armed_ = true;
    seen_ = {};
    injected_ = 0;
    log_.clear();
  }
  /// The disk is well again.
  void heal() {
    const std::lock_guard lock(mutex_);
    is_armed_ = false;
  }
  uint64_t injected() const {
    const std::lock_guard lock(mutex_);
    return injected_;
  }
  uint64_t seen(KernelCall call) const {
    const std::lock_guard lock(mutex_);
    return seen_[static_cast<int>(call)];
  }
  std::vector<std::string> log() const {
    const std::lock_guard lock(mutex_);
    return log_;
  }

  int open(const char* path, int flags, mode_t mode) override {
    const KernelFault fault = next(KernelCall::kOpen, 0, path);
    return fault.error_number != 0 ? -fault.error_number : Syscalls::open(path, flags, mode);
  }
  int open_at(int folder, const char* name, int flags, mode_t mode) override {
    const KernelFault fault = next(KernelCall::kOpen, 0, name);
    return fault.error_number != 0 ? -fault.error_number
                                   : Syscalls::open_at(folder, name, flags, mode);
  }
  int facts(int fd, struct stat* facts) override {
    const KernelFault fault = next(KernelCall::kFacts, 0, name_of(fd));
    return fault.error_number != 0 ? -fault.error_number : Syscalls::facts(fd, facts);
  }
  int facts_at(int folder, const char* name, struct stat* facts, int flags) override {
    const KernelFault fault = next(KernelCall::kFacts, 0, name);
    return fault.error_number != 0 ? -fault.error_number
                                   : Syscalls::facts_at(folder, name, facts, flags);
  }
  int fallocate(int fd, int mode, int64_t offset_bytes, int64_t length_bytes) override {
    const KernelFault fault = next(KernelCall::kAllocate, offset_bytes, name_of(fd));
    if (fault.error_number != 0) return -fault.error_number;
    return Syscalls::fallocate(fd, mode, offset_bytes, length_bytes);
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    const KernelFault fault = next(KernelCall::kWrite, offset_bytes, name_of(fd));
    if (fault.error_number != 0) return -fault.error_number;
    const auto all = static_cast<int64_t>(bytes);
    return Syscalls::pwrite(fd, data, static_cast<size_t>(fault.is_short ? half(all) : all),
                            offset_bytes);
  }
  int64_t preadv(int fd, const iovec* targets, int count, int64_t offset_bytes) override {
    const KernelFault fault = next(KernelCall::kRead, offset_bytes, name_of(fd));
    if (fault.error_number != 0) return -fault.error_number;
    const int64_t result = Syscalls::preadv(fd, targets, count, offset_bytes);
    return fault.is_short && result > 0 ? half(result) : result;
  }
  int ring_setup(unsigned entries, io_uring* ring, unsigned flags) override {
    const KernelFault fault = next(KernelCall::kRingSetup, entries);
    return fault.error_number != 0 ? -fault.error_number
                                   : Syscalls::ring_setup(entries, ring, flags);
  }
  int ring_submit(io_uring* ring, unsigned completions) override {
    const KernelFault fault = next(KernelCall::kRingSubmit, completions);
    if (fault.error_number != 0) return -fault.error_number;
    if (!is_holding()) return Syscalls::ring_submit(ring, completions);
    // What is held back comes without the kernel's waking anybody.
    ::usleep(100);
    return Syscalls::ring_submit(ring, 0);
  }
  int ring_reap(io_uring* ring, std::span<RingCompletion> completions) override {
    std::array<RingCompletion, 64> fresh;
    const int count = Syscalls::ring_reap(
        ring, std::span(fresh).first(std::min<size_t>(fresh.size(), completions.size())));
    for (int i = 0; i < count; ++i) {
      RingCompletion completion = fresh[i];
      KernelFault fault;
      if (completion.tag != kWake) fault = next(KernelCall::kRead, 0, "", false);
      if (fault.error_number != 0) completion.result = -fault.error_number;
      if (fault.is_short && completion.result > 0) {
        completion.result = static_cast<int>(half(completion.result));
      }
      const std::lock_guard lock(mutex_);
      held_.push_back({ring, now_us() + fault.delay_us + (fault.reorders ? 2000 : 0), completion});
      reverses_ |= fault.reorders;
    }
    return release(ring, completions);
  }

 private:
  static constexpr uint64_t kWake = ~uint64_t{0};
  struct Held {
    io_uring* ring = nullptr;
    int64_t due_us = 0;
    RingCompletion completion;
  };

  static int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static int64_t half(int64_t bytes) {
    constexpr int64_t kBlock = 4096;
    return bytes < 2 * kBlock ? bytes : bytes / 2 / kBlock * kBlock;
  }

  /// Of an open file, where a fault asks for one.
  std::string name_of(int fd) const {
    {
      const std::lock_guard lock(mutex_);
      if (!is_armed_ || fault_.name.empty()) return "";
    }
    std::array<char, 4096> name{};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), name.data(), name.size());
    return length < 0 ? "" : std::string(name.data(), static_cast<size_t>(length));
  }

  /// What happens to this call; nothing, as a rule.
  KernelFault next(KernelCall call, int64_t at, const std::string& name = "", bool delays = true) {
    KernelFault fault;
    {
      const std::lock_guard lock(mutex_);
      if (is_armed_ && name.find(fault_.name) == std::string::npos) return fault;
      const uint64_t number = ++seen_[static_cast<int>(call)];
      const bool strikes = is_armed_ && fault_.call == call &&
                           (fault_.is_lasting ? number >= fault_.nth : number == fault_.nth);
      if (!strikes) return fault;
      fault = fault_;
      ++injected_;
      if (log_.size() < 1000) {
        log_.push_back(std::string(call_name(call)) + " " + std::to_string(number) + " at " +
                       std::to_string(at) + ": errno " + std::to_string(fault.error_number));
      }
    }
    if (delays && fault.delay_us > 0) ::usleep(static_cast<useconds_t>(fault.delay_us));
    return fault;
  }

  bool is_holding() const {
    const std::lock_guard lock(mutex_);
    return !held_.empty();
  }

  int release(io_uring* ring, std::span<RingCompletion> completions) {
    const std::lock_guard lock(mutex_);
    size_t count = 0;
    const int64_t now = now_us();
    std::vector<Held> left;
    for (const Held& held : held_) {
      if (held.ring == ring && held.due_us <= now && count < completions.size()) {
        completions[count++] = held.completion;
      } else {
        left.push_back(held);
      }
    }
    held_ = std::move(left);
    if (reverses_)
      std::reverse(completions.begin(), completions.begin() + static_cast<int64_t>(count));
    if (held_.empty()) reverses_ = false;
    return static_cast<int>(count);
  }

  mutable std::mutex mutex_;
  KernelFault fault_;
  bool is_armed_ = false;
  std::array<uint64_t, kKernelCalls> seen_{};
  uint64_t injected_ = 0;
  std::vector<std::string> log_;
  std::vector<Held> held_;
  bool reverses_ = false;
};

}  // namespace kvswap
