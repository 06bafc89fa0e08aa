#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>
#include <string>

namespace fake_cuda {

/// A fault that CUDA would not tell: ends the process.
[[noreturn]] void stop(const std::string& what);

/// The memory of all devices: a range of addresses that the host may not touch.
///
/// An allocation is reserved, there, and freed, the latter two when its stream says so. It ends
/// before a page that is never there, and its addresses are never used again. Whoever touches what
/// is not there, and host code that touches what is, gets a sentence and SIGSEGV. Copies use a
/// second view of the same memory.
///
/// Memory is opened while a kernel runs, to all threads, since protection is the process's: a host
/// that touches it just then is not seen. Under ThreadSanitizer what is there stays open and the
/// second view is not used, so that races between streams, and with the host, show there.
///
/// Any thread.
class DeviceMemory {
 public:
  static DeviceMemory& get();

  /// Addresses, aligned to 256; null where `bytes_max` in all would be exceeded.
  std::byte* reserve(int64_t bytes, int64_t bytes_max);
  /// False: it is no allocation, or was given back before.
  bool give_back(const void* memory);
  void appear(const void* memory);
  void vanish(const void* memory);
  void vanish_all();

  bool holds(const void* address) const;
  /// Where a copy finds these bytes; stops unless all are of one allocation that is there.
  std::byte* reach(const void* address, int64_t bytes, const std::string& what) const;
  int64_t allocations() const;  // not yet given back

  /// A kernel is running on this thread as long as it lives.
  class Running {
   public:
    Running();
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
  };

 private:
  enum class State { kReserved, kThere, kFreed };
  struct Allocation {
    int64_t bytes = 0;  // from its address to its guard page
    State state = State::kReserved;
    bool is_given_back = false;
  };
  using Allocations = std::map<const std::byte*, Allocation>;

  DeviceMemory();
  void vanish(Allocations::value_type& allocation);
  void protect(const Allocations::value_type& allocation, bool is_open) const;
  void open_all(bool is_open) const;
  const Allocations::value_type* find(const void* address) const;
  std::string describe(const void* address) const;
  static void on_fault(int signal, void* info, void* context);

  mutable std::shared_mutex mutex_;
  std::byte* view_ = nullptr;    // the device's addresses
  std::byte* copies_ = nullptr;  // the same memory, always open
  int fd_ = -1;
  int64_t page_bytes_ = 0;
  int64_t used_bytes_ = 0;   // of the addresses
  int64_t given_bytes_ = 0;  // reserved and not yet freed
  int running_ = 0;          // kernels
  Allocations allocations_;
};

}  // namespace fake_cuda
