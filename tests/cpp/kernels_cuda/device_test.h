#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "kernels/kernel_test.h"
#include "kernels_cuda/emulated/cuda_runtime.h"

namespace kvswap {

/// Memory that ends where the address space does: touching what lies behind it is a fault. The base
/// is 16-byte aligned, so up to 15 bytes of slack are not watched.
template <typename T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(int64_t count) : count_(count) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = (count * sizeof(T) + 15) / 16 * 16;
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    char* guard = base_ + mapped_ - page;
    mprotect(guard, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(guard - bytes);
    std::memset(static_cast<void*>(data_), 0x7e, bytes);  // nothing that would pass for a result
  }
  explicit GuardedBuffer(const std::vector<T>& values)
      : GuardedBuffer(static_cast<int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), data_);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer() { munmap(base_, mapped_); }

  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  int64_t size() const { return count_; }
  std::vector<T> copy() const { return {data_, data_ + count_}; }

 private:
  int64_t count_;
  size_t mapped_;
  char* base_;
  T* data_;
};

/// Runs a call with the threads of each block in three orders; results that differ are a race.
/// One order will do where an emulator runs the CPU, which takes minutes and changes none of them.
template <typename Call>
void in_every_order(const Call& call) {
  for (const auto order :
       {emulated::Order::kShuffled, emulated::Order::kRising, emulated::Order::kFalling}) {
    emulated::order = order;
    call();
    if (KVSWAP_CPU_IS_EMULATED) return;
  }
}

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.is_ok()) << status.message(); }

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace kvswap
