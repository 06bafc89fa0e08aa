#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/io_thread.h"
#include "io/status.h"

namespace kvswap {

/// The threads that read one disk, for all thread readers of the process: a hundred caches take no
/// more threads than one, and a disk that hangs holds up its own readers alone.
///
/// A reader with reads to make posts itself, once for each thread it wants; a thread makes a few
/// reads of the work that waits longest, and puts it behind the others while there is more.
///
/// Thread rules: all from any thread. The last owner's destructor joins the threads; nothing may be
/// posted then. Not valid in a forked child.
class ReadPool {
 public:
  class Work {
   public:
    virtual ~Work() = default;
    /// Makes a few reads; false when there was none, and then the pool does not touch it again.
    virtual bool read_some() = 0;
  };

  /// The pool of the disk that `fd` lies on.
  static std::shared_ptr<ReadPool> of_disk(int fd);
  ReadPool() = default;
  ~ReadPool();
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  /// At least so many threads, or as many as the system grants; one is enough.
  Status grow(int threads);
  void post(Work* work, int times);
  bool is_here() const { return owner_.is_here(); }

 private:
  void run();

  OwnerProcess owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Work*> waiting_;  // the oldest first
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvswap
