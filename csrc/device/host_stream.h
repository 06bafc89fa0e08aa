#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "io/status.h"

namespace kvswap {

/// Points of streams, and who has reached them. Any thread.
class HostEvents {
 public:
  using Clock = std::chrono::steady_clock;

  int32_t make();
  /// A new point of `event`; reach() it when its turn has come.
  uint64_t mark(int32_t event);
  void reach(int32_t event, uint64_t point);
  uint64_t last(int32_t event) const;
  void wait(int32_t event, uint64_t point) const;
  double seconds_between(int32_t begin, int32_t end) const;

 private:
  struct State {
    uint64_t marked = 0;
    uint64_t reached = 0;
    Clock::time_point reached_at;
  };
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<State> states_;
};

/// A stream of a device that is no device: a thread that does what is queued, in order and late.
///
/// `delay_us_max` > 0: it sleeps up to so long before some operations, so that an order which
/// nothing enforces does not come about by chance. `delay_us_each`: so long before each, besides.
class HostStream {
 public:
  HostStream(uint64_t seed, int64_t delay_us_max, int64_t delay_us_each);
  ~HostStream();
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  Status start();
  void push(std::function<void()> operation);
  /// Waits until all that was pushed is done.
  void drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::minstd_rand random_;
  int64_t delay_us_max_;
  int64_t delay_us_each_;
  std::thread thread_;
};

}  // namespace kvswap
