#include "io/read_pool.h"

#include <sys/stat.h>

#include <map>
#include <string>
#include <utility>

namespace kvswap {

std::shared_ptr<ReadPool> ReadPool::of_disk(int fd) {
  static std::mutex mutex;
  static std::map<dev_t, std::weak_ptr<ReadPool>> pools;
  struct stat facts{};
  const dev_t disk = ::fstat(fd, &facts) == 0 ? facts.st_dev : 0;
  const std::lock_guard lock(mutex);
  std::erase_if(pools, [](const auto& entry) { return entry.second.expired(); });
  // A forked child has its parent's entries and none of its threads.
  if (std::shared_ptr<ReadPool> pool = pools[disk].lock(); pool && pool->is_here()) return pool;
  auto pool = std::make_shared<ReadPool>();
  pools[disk] = pool;
  return pool;
}

ReadPool::~ReadPool() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Status ReadPool::grow(int threads) {
  const std::lock_guard lock(mutex_);
  threads_.reserve(static_cast<size_t>(threads));  // none may run that has no place here
  while (threads_.size() < static_cast<size_t>(threads)) {
    const std::string name = "kvswap-read-" + std::to_string(threads_.size());
    Result<std::thread> thread = start_io_thread(name, [this] { run(); });
    if (!thread.is_ok()) return threads_.empty() ? thread.status() : Status::ok();
    threads_.push_back(std::move(thread.value()));
  }
  return Status::ok();
}

void ReadPool::post(Work* work, int times) {
  {
    const std::lock_guard lock(mutex_);
    // Also for what threads put back: they have nobody who would hear of it.
    waiting_.reserve(waiting_.size() + static_cast<size_t>(times) + threads_.size());
    waiting_.insert(waiting_.end(), static_cast<size_t>(times), work);
  }
  // One is woken here, and each that finds more wakes the next: the caller pays for one alone, and
  // threads that are awake already take their share before others have to be.
  if (times > 0) changed_.notify_one();
}

void ReadPool::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !waiting_.empty() || is_stopping_; });
    if (waiting_.empty()) return;
    Work* const work = waiting_.front();
    waiting_.erase(waiting_.begin());
    const bool is_enough = waiting_.empty();
    lock.unlock();
    if (!is_enough) changed_.notify_one();
    const bool has_more = work->read_some();
    lock.lock();
    if (has_more) waiting_.push_back(work);
  }
}

}  // namespace kvswap
