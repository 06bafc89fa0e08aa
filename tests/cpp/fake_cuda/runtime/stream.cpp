#include "stream.h"

#include <signal.h>

#include <utility>

#include "device_memory.h"

namespace fake_cuda {

void Point::reach() {
  {
    const std::lock_guard lock(mutex_);
    is_reached_ = true;
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_reached_; });
}

bool Point::is_reached() {
  const std::lock_guard lock(mutex_);
  return is_reached_;
}

std::chrono::steady_clock::time_point Point::when() {
  const std::lock_guard lock(mutex_);
  return when_;
}

}  // namespace fake_cuda

CUstream_st::CUstream_st(int device, uint64_t seed, int64_t delay_us_max)
    : device(device), queue(seed, delay_us_max, 0) {
  if (!queue.start().is_ok()) fake_cuda::stop("the system gives no thread for a stream");
  // A fault there is to be told by DeviceMemory's handler.
  queue.push([] {
    sigset_t faults;
    sigemptyset(&faults);
    sigaddset(&faults, SIGSEGV);
    sigaddset(&faults, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);
  });
}

void CUstream_st::push(std::function<void()> operation) {
  queue.push([operation = std::move(operation)] {
    if (emulated::broken() == cudaSuccess) operation();
  });
}

void CUstream_st::push_reach(std::shared_ptr<fake_cuda::Point> point) {
  queue.push([point = std::move(point)] { point->reach(); });
}
