#include "device/host_stream.h"

#include "io/io_thread.h"

namespace kvswap {

int32_t HostEvents::make() {
  const std::lock_guard lock(mutex_);
  states_.emplace_back();
  return static_cast<int32_t>(states_.size() - 1);
}

uint64_t HostEvents::mark(int32_t event) {
  const std::lock_guard lock(mutex_);
  return ++states_.at(event).marked;
}

void HostEvents::reach(int32_t event, uint64_t point) {
  {
    const std::lock_guard lock(mutex_);
    State& state = states_.at(event);
    state.reached = std::max(state.reached, point);
    state.reached_at = Clock::now();
  }
  changed_.notify_all();
}

uint64_t HostEvents::last(int32_t event) const {
  const std::lock_guard lock(mutex_);
  return states_.at(event).marked;
}

void HostEvents::wait(int32_t event, uint64_t point) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return states_.at(event).reached >= point; });
}

double HostEvents::seconds_between(int32_t begin, int32_t end) const {
  const std::lock_guard lock(mutex_);
  const auto is_done = [](const auto& state) { return state.reached == state.marked; };
  if (!is_done(states_.at(begin)) || !is_done(states_.at(end))) return 0;  // nothing is known
  const auto passed = states_.at(end).reached_at - states_.at(begin).reached_at;
  return std::chrono::duration<double>(passed).count();
}

HostStream::HostStream(uint64_t seed, int64_t delay_us_max, int64_t delay_us_each)
    : random_(static_cast<std::minstd_rand::result_type>(seed)),
      delay_us_max_(delay_us_max),
      delay_us_each_(delay_us_each) {}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status HostStream::start() {
  auto thread = start_io_thread("kvswap-stream", [this] { run(); });
  if (!thread.is_ok()) return thread.status();
  thread_ = std::move(thread.value());
  return Status::ok();
}

void HostStream::push(std::function<void()> operation) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
  }
  changed_.notify_all();
}

void HostStream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !is_busy_; });
}

void HostStream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() || is_stopping_; });
    if (queue_.empty()) return;
    const std::function<void()> operation = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    int64_t delay_us = delay_us_each_;
    if (delay_us_max_ > 0 && random_() % 4 == 0) delay_us += random_() % delay_us_max_;
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    operation();
    lock.lock();
    is_busy_ = false;
    if (queue_.empty()) changed_.notify_all();
  }
}

}  // namespace kvswap
