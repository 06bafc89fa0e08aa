#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "device/host_stream.h"
#include "kernels_cuda/emulated/cuda_runtime_api.h"

namespace fake_cuda {

/// Where an event was recorded once. Each record has its own lock: under ThreadSanitizer a wait
/// orders what it waits for, and nothing else.
class Point {
 public:
  void reach();
  void wait();
  bool is_reached();
  std::chrono::steady_clock::time_point when();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

}  // namespace fake_cuda

struct CUstream_st {
  CUstream_st(int device, uint64_t seed, int64_t delay_us_max);
  /// Nothing of it happens once the device is broken.
  void push(std::function<void()> operation);
  void push_reach(std::shared_ptr<fake_cuda::Point> point);
  void wait_until_done() { queue.drain(); }

  const int device;
  bool is_capturing = false;

 private:
  kvswap::HostStream queue;
};

struct CUevent_st {
  int device = 0;
  bool is_timed = false;
  std::shared_ptr<fake_cuda::Point> newest;  // null: never recorded
};

struct CUmemPoolHandle_st {
  int device = 0;
};
