#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/io_thread.h"
#include "io/status.h"

namespace kvswap {

/// A few threads that help with short loops of a caller that mostly waits for a device.
///
/// The caller takes pieces from the first moment on, and waits for no thread that has not begun
/// one: a helper that wakes late finds nothing left and sleeps on. OpenMP's loops end when the last
/// of all threads has woken, which with sixteen of them takes longer than a loop of ours.
///
/// Thread rules: all from any thread; of loops that run at once, and of one within another, the
/// second is its caller's alone. In a forked child, where the helpers do not exist, so are all.
class ThreadTeam {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;

  /// helpers: beside the caller; fewer where the system grants fewer.
  static std::shared_ptr<ThreadTeam> start(int helpers);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  /// A ParallelFor: body(begin, end) over disjoint pieces of [0, count), each of `grain` but the
  /// last. What one throws ends the loop, and is thrown here when no thread is in it any more.
  void run(int64_t count, int64_t grain, const Body& body);

  bool is_here() const { return owner_.is_here(); }
  int helpers() const { return static_cast<int>(threads_.size()); }

 private:
  struct Loop {
    const Body& body;
    const int64_t count;
    const int64_t piece;
    std::atomic<int64_t> next = 0;
    std::mutex failing = {};
    std::exception_ptr failure = {};  // the first

    void take_pieces() noexcept;
    bool has_pieces() const { return next.load(std::memory_order_relaxed) < count; }
  };

  ThreadTeam() = default;
  void help();

  OwnerProcess owner_;
  std::atomic<bool> is_busy_ = false;  // with the one loop that has helpers
  std::mutex mutex_;
  std::condition_variable begun_;
  std::condition_variable ended_;
  Loop* loop_ = nullptr;
  int helping_ = 0;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvswap
