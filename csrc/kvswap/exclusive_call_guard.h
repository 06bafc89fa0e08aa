#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "kvswap/errors.h"

namespace kvswap {

/// Lets one thread at a time into a session, and close() from any: two atomic operations a call.
///
/// States: idle <-> busy; idle -> closing -> closed. A second call while one runs is refused, from
/// another thread or from a signal's handler, and never waits. close() waits for the running call;
/// called from within one, it takes effect when that call returns. When it has returned in another
/// thread the session may be destroyed: a call that has ended touches it no more.
class ExclusiveCallGuard {
 public:
  /// A call under way; its end lets the next one in. Throws SessionError: kBusy while another call
  /// runs, kClosed after close().
  class Call {
   public:
    explicit Call(ExclusiveCallGuard& owner) : owner_(owner) { owner_.enter(); }
    ~Call() { owner_.leave(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    ExclusiveCallGuard& owner_;
  };

  /// `stop` makes the running call end early. True for the one caller that shall free what there
  /// is and then call closed(); false when that is done, or will be by the running call.
  template <typename Stop>
  bool close(const Stop& stop) {
    wants_close_ = true;
    for (;;) {
      int state = kIdle;
      if (state_.compare_exchange_strong(state, kClosing)) {
        wait_for_stoppers();
        return true;
      }
      if (state == kClosed) return false;
      if (state == kBusy) {
        if (::getpid() != pid_) return false;  // a forked child, where nobody will end the call
        stop_call(stop);
        if (caller_.load() == std::this_thread::get_id()) {
          is_close_due_ = true;
          return false;
        }
      }
      state_.wait(state);
    }
  }
  void closed() {
    state_ = kClosed;
    state_.notify_all();
  }
  /// Was close() called from within the call that runs? To be asked before it ends.
  bool is_close_due() const { return is_close_due_; }

 private:
  enum State : int { kIdle, kBusy, kClosing, kClosed };

  [[noreturn]] void refuse(int state) const {
    if (wants_close_ || state == kClosing || state == kClosed) {
      throw SessionError(SessionError::Kind::kClosed,
                         "session: must be open, got a call after close(); open another one");
    }
    throw SessionError(SessionError::Kind::kBusy,
                       "session: must be used by one thread at a time, got a call while another "
                       "one runs; give each thread a session, or wait for the other");
  }
  /// The call may return meanwhile, and its thread close what `stop` touches: that one waits.
  template <typename Stop>
  void stop_call(const Stop& stop) {
    ++stoppers_;
    if (state_ == kBusy) stop();
    --stoppers_;
    stoppers_.notify_all();
  }
  void wait_for_stoppers() {
    for (int count = stoppers_; count != 0; count = stoppers_) stoppers_.wait(count);
  }
  void enter() {
    int state = kIdle;
    if (wants_close_ || !state_.compare_exchange_strong(state, kBusy)) refuse(state);
    caller_ = std::this_thread::get_id();
  }
  void leave() {
    caller_ = std::thread::id();
    state_ = kIdle;
    state_.notify_all();
  }

  std::atomic<int> state_ = kIdle;
  std::atomic<bool> wants_close_ = false;
  std::atomic<bool> is_close_due_ = false;
  std::atomic<int> stoppers_ = 0;
  std::atomic<std::thread::id> caller_;
  const pid_t pid_ = ::getpid();
};

}  // namespace kvswap
