#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "io/status.h"

namespace kvswap {

/// How long calls stand still for the disk, and who may end their waiting.
///
/// A call that waits looks up every 100 ms. What it waits for and has made no progress for a second
/// is logged once, with its place; for longer than the limit it is given up with kLate, once the
/// call itself has waited for a second. Time in which the waiting process stood still (stopped, or
/// its machine paused) does not count. A call that was asked to end returns kInterrupted. Either
/// way nothing is lost, and what is in flight stays so.
///
/// Thread rules: stop() from any thread; set_question() before the first wait.
class WaitPolicy {
 public:
  static constexpr auto kLookUp = std::chrono::milliseconds(100);

  /// timeout_seconds: of a read or write without progress; 0: no limit.
  explicit WaitPolicy(double timeout_seconds = 60) : timeout_seconds_(timeout_seconds) {}

  /// Asked by the waiting thread, without locks; true ends the call. For Ctrl-C.
  void set_question(std::function<bool()> shall_end) { shall_end_ = std::move(shall_end); }

  /// Waiting calls end at their next look, later ones at once.
  void stop() { is_stopped_ = true; }
  /// From now on everything is waited for, however long: memory must outlive what is in flight.
  void wait_for_all() { waits_for_all_ = true; }

  /// Ok unless the call that is under way shall end.
  Status check() const;

  /// Waits for `ready`, under the lock.
  ///
  /// progressed_ns: when what is waited for last came forward, of the steady clock.
  /// describe: "read of 4096 bytes at offset 0 of the session file in '/x'".
  template <typename Ready, typename Progressed, typename Describe>
  Status wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
              const Ready& ready, const Progressed& progressed_ns, const Describe& describe) const {
    Watch watch;
    while (!changed.wait_for(lock, kLookUp, ready)) {
      watch.look(progressed_ns());
      const std::string what = describe();
      lock.unlock();
      Status looked = look_up(what, watch);
      lock.lock();
      if (!looked.is_ok() && !ready()) return looked;
    }
    return Status::ok();
  }

  static int64_t now_ns();

 private:
  /// Of one call that waits.
  struct Watch {
    const int64_t began_ns = now_ns();
    int64_t looked_ns = began_ns;
    int64_t progressed_ns = 0;
    int64_t stood_ns = 0;  // since then
    bool is_logged = false;

    void look(int64_t progressed);
    /// At the last look, without progress.
    double seconds() const;
  };
  Status look_up(const std::string& what, Watch& watch) const;

  const double timeout_seconds_;
  std::function<bool()> shall_end_;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> waits_for_all_ = false;
};

/// One line to standard error, or to what took the place of it.
void log_line(const std::string& line);
/// For tests and programs with a log of their own; null: standard error again.
void set_log(std::function<void(const std::string&)> log);

}  // namespace kvswap
