#include "io/thread_team.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvswap {

void ThreadTeam::Loop::take_pieces() noexcept {
  try {
    for (;;) {
      const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + piece));
    }
  } catch (...) {
    next.store(count, std::memory_order_relaxed);
    const std::lock_guard lock(failing);
    if (!failure) failure = std::current_exception();
  }
}

std::shared_ptr<ThreadTeam> ThreadTeam::start(int helpers) {
  // A forked child leaves its copy alone: it would wait for threads that it does not have.
  std::shared_ptr<ThreadTeam> team(new ThreadTeam(), [](ThreadTeam* own) {
    if (own->owner_.is_here()) delete own;
  });
  const std::lock_guard lock(team->mutex_);
  team->threads_.reserve(static_cast<size_t>(std::max(0, helpers)));
  for (int i = 0; i < helpers; ++i) {
    auto thread =
        start_io_thread("kvswap-help-" + std::to_string(i), [own = team.get()] { own->help(); });
    if (!thread.is_ok()) break;
    team->threads_.push_back(std::move(thread.value()));
  }
  return team;
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::run(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  const int64_t piece = std::max<int64_t>(1, grain);
  if (count <= piece || threads_.empty() || !owner_.is_here() || is_busy_.exchange(true)) {
    body(0, count);
    return;
  }
  Loop loop{.body = body, .count = count, .piece = piece};
  {
    const std::lock_guard lock(mutex_);
    loop_ = &loop;
  }
  begun_.notify_one();  // which wakes the next, while there are pieces
  loop.take_pieces();
  {
    std::unique_lock lock(mutex_);
    loop_ = nullptr;
    ended_.wait(lock, [this] { return helping_ == 0; });
  }
  is_busy_ = false;
  if (loop.failure) std::rethrow_exception(loop.failure);
}

void ThreadTeam::help() {
  std::unique_lock lock(mutex_);
  for (;;) {
    begun_.wait(lock, [this] { return is_stopping_ || (loop_ != nullptr && loop_->has_pieces()); });
    if (is_stopping_) return;
    Loop& loop = *loop_;
    ++helping_;
    lock.unlock();
    begun_.notify_one();
    loop.take_pieces();
    lock.lock();
    if (--helping_ == 0) ended_.notify_one();
  }
}

}  // namespace kvswap
