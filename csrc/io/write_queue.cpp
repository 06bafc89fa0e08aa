#include "io/write_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/io_thread.h"
#include "io/mapped_memory.h"
#include "io/stopwatch.h"

namespace kvswap {
namespace {

constexpr int64_t kBufferAlignment = 4096;
constexpr int kPauseMicroseconds = 1000;  // before a write is tried once more

/// The queue itself, apart from its owner so that a forked child can leave it alone.
class QueueState {
 public:
  QueueState(DataFile* file, const WriteQueueOptions& options)
      : file_(file),
        options_(options),
        memory_(options.buffer_bytes * options.buffers, options.is_wiped) {
    const auto buffers = static_cast<size_t>(options.buffers);
    jobs_.reserve(buffers);
    free_.reserve(buffers);
    for (int index = options.buffers - 1; index >= 0; --index) free_.push_back(index);
  }

  ~QueueState() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      while (!jobs_.empty() && !(is_writing_ && jobs_.size() == 1)) jobs_.pop_back();
    }
    work_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  Status start() {
    if (!memory_.is_there()) {
      return Status::budget("write queue: " + std::to_string(resident_bytes()) +
                            " bytes of staging memory must be available, but the system refused "
                            "them; lower buffer_bytes or buffers");
    }
    if (options_.is_within_calls) return Status::ok();
    Result<std::thread> thread = start_io_thread("kvswap-write", [this] { run(); });
    if (thread.is_ok()) {
      thread_ = std::move(thread.value());
    } else {
      log_line("kvswap: " + thread.status().message() + ". Writes are done by the caller instead.");
    }
    return Status::ok();
  }

  Result<WriteQueue::Buffer> acquire();
  void give_back(const WriteQueue::Buffer& buffer);
  Result<uint64_t> submit(const WriteQueue::Buffer& buffer, int64_t offset_bytes,
                          int64_t length_bytes);
  Status wait(uint64_t number);
  void drop(uint64_t number);
  void forget();

  uint64_t written() const {
    const std::lock_guard lock(mutex_);
    return finished();
  }
  uint64_t bytes_written() const {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = bytes_written_;
    for (const Job& job : jobs_) bytes += static_cast<uint64_t>(job.length_bytes);
    return bytes;
  }
  double blocked_seconds() const {
    const std::lock_guard lock(mutex_);
    return blocked_seconds_;
  }
  int64_t resident_bytes() const { return options_.buffer_bytes * options_.buffers; }
  std::span<std::byte> memory() const {
    return {memory_.data(), static_cast<size_t>(resident_bytes())};
  }

 private:
  struct Job {
    uint64_t number = 0;
    int index = -1;
    int64_t offset_bytes = 0;
    int64_t length_bytes = 0;
    bool is_unwanted = false;  // an error of it is nobody's
  };

  std::byte* address(int index) const { return memory_.data() + options_.buffer_bytes * index; }
  uint64_t finished() const { return jobs_.empty() ? submitted_ : jobs_.front().number - 1; }
  bool has_work() const { return !jobs_.empty() && error_.is_ok(); }
  std::string describe() const;
  const WaitPolicy& patience() const;
  Status write(const Job& job) const;
  void write_oldest(std::unique_lock<std::mutex>& lock);
  void run();
  template <typename Ready>
  Status wait_until(std::unique_lock<std::mutex>& lock, const Ready& ready);

  DataFile* const file_;
  const WriteQueueOptions options_;
  const MappedMemory memory_;
  mutable std::mutex mutex_;
  std::condition_variable work_;      // for our thread
  std::condition_variable progress_;  // for the producer
  std::vector<int> free_;
  std::vector<Job> jobs_;  // oldest first, the one being written too; never more than buffers
  uint64_t submitted_ = 0;
  uint64_t bytes_written_ = 0;
  double blocked_seconds_ = 0;
  Status error_;             // of the oldest job, which is kept
  bool is_writing_ = false;  // the oldest job, without the lock
  int64_t began_ns_ = 0;     // to write it
  bool stopping_ = false;
  std::thread thread_;
};

const WaitPolicy& QueueState::patience() const {
  static const WaitPolicy usual;
  return options_.patience == nullptr ? usual : *options_.patience;
}

std::string QueueState::describe() const {
  if (jobs_.empty()) return "write";
  return "write of " + std::to_string(jobs_.front().length_bytes) + " bytes at offset " +
         std::to_string(jobs_.front().offset_bytes) + " of the session file in '" +
         file_->directory() + "'";
}

/// Waits for `ready`; a queue that stands still is made to try again, once.
template <typename Ready>
Status QueueState::wait_until(std::unique_lock<std::mutex>& lock, const Ready& ready) {
  if (ready()) return Status::ok();
  if (!is_writing_) began_ns_ = WaitPolicy::now_ns();
  const auto start = std::chrono::steady_clock::now();
  error_ = Status::ok();
  work_.notify_one();
  while (!thread_.joinable() && has_work() && !ready()) write_oldest(lock);
  Status waited = patience().wait(
      lock, progress_, [&] { return ready() || !error_.is_ok(); }, [&] { return began_ns_; },
      [&] { return describe(); });
  blocked_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!waited.is_ok()) return waited;
  return ready() ? Status::ok() : error_;
}

Result<WriteQueue::Buffer> QueueState::acquire() {
  std::unique_lock lock(mutex_);
  if (!error_.is_ok()) {
    const uint64_t failed = jobs_.front().number;
    KVSWAP_RETURN_IF_ERROR(wait_until(lock, [&] { return finished() >= failed; }));
  }
  KVSWAP_RETURN_IF_ERROR(wait_until(lock, [&] { return !free_.empty(); }));
  const int index = free_.back();
  free_.pop_back();
  return WriteQueue::Buffer{address(index), options_.buffer_bytes, index};
}

void QueueState::give_back(const WriteQueue::Buffer& buffer) {
  const std::lock_guard lock(mutex_);
  // Ours: a buffer comes from acquire().
  KVSWAP_ASSERT(buffer.index >= 0 && buffer.index < options_.buffers);
  free_.push_back(buffer.index);
}

Result<uint64_t> QueueState::submit(const WriteQueue::Buffer& buffer, int64_t offset_bytes,
                                    int64_t length_bytes) {
  const int64_t alignment = file_->alignment_bytes();
  if (offset_bytes < 0 || offset_bytes % alignment != 0 || length_bytes < 1 ||
      length_bytes % alignment != 0 || length_bytes > options_.buffer_bytes) {
    give_back(buffer);
    return Status::invalid(
        "write queue: offset and length must be multiples of " + std::to_string(alignment) +
        " and the length within " + std::to_string(options_.buffer_bytes) + ", got offset " +
        std::to_string(offset_bytes) + " and length " + std::to_string(length_bytes));
  }
  std::unique_lock lock(mutex_);
  // Ours: a buffer comes from acquire().
  KVSWAP_ASSERT(buffer.index >= 0 && buffer.index < options_.buffers);
  jobs_.push_back({++submitted_, buffer.index, offset_bytes, length_bytes});
  const uint64_t number = submitted_;
  if (thread_.joinable()) {
    work_.notify_one();
  } else if (has_work()) {
    write_oldest(lock);
  }
  return number;
}

Status QueueState::wait(uint64_t number) {
  std::unique_lock lock(mutex_);
  if (number > submitted_) {
    return Status::invalid("write queue: the number must have been submitted, got " +
                           std::to_string(number) + " of " + std::to_string(submitted_));
  }
  return wait_until(lock, [&] { return finished() >= number; });
}

void QueueState::drop(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto job = std::find_if(jobs_.begin(), jobs_.end(),
                                [&](const Job& each) { return each.number == number; });
  if (job == jobs_.end()) return;
  if (error_.is_ok()) {
    // Written like the others, so that what is counted does not depend on timing.
    job->is_unwanted = true;
    return;
  }
  if (job == jobs_.begin()) error_ = Status::ok();
  free_.push_back(job->index);
  jobs_.erase(job);
  work_.notify_one();
  progress_.notify_all();
}

void QueueState::forget() {
  std::vector<uint64_t> numbers;
  {
    const std::lock_guard lock(mutex_);
    for (const Job& job : jobs_) numbers.push_back(job.number);
  }
  // The newest first: the oldest one's error keeps the queue still.
  for (auto number = numbers.rbegin(); number != numbers.rend(); ++number) drop(*number);
}

Status QueueState::write(const Job& job) const {
  const Stopwatch watch(options_.timeline, {.kind = SpanKind::kWrite, .bytes = job.length_bytes});
  const std::span<const std::byte> bytes = {address(job.index),
                                            static_cast<size_t>(job.length_bytes)};
  Status written = file_->write(job.offset_bytes, bytes);
  const int error = written.error_number();
  if (error != EIO && error != EAGAIN && error != EINTR) return written;
  ::usleep(kPauseMicroseconds);
  return file_->write(job.offset_bytes, bytes);
}

/// Nothing may follow a hole: a write that fails stays the oldest.
void QueueState::write_oldest(std::unique_lock<std::mutex>& lock) {
  const Job job = jobs_.front();
  is_writing_ = true;
  began_ns_ = WaitPolicy::now_ns();
  lock.unlock();
  Status status = write(job);
  lock.lock();
  is_writing_ = false;
  if (status.is_ok()) bytes_written_ += static_cast<uint64_t>(job.length_bytes);
  if (status.is_ok() || jobs_.front().is_unwanted) {
    free_.push_back(job.index);
    jobs_.erase(jobs_.begin());
  } else {
    error_ = std::move(status);
  }
  progress_.notify_all();
}

void QueueState::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return has_work() || stopping_; });
    if (stopping_) return;
    write_oldest(lock);
  }
}

class ThreadedWriteQueue final : public WriteQueue {
 public:
  explicit ThreadedWriteQueue(std::unique_ptr<QueueState> state) : state_(std::move(state)) {}

  ~ThreadedWriteQueue() override {
    if (!owner_.is_here()) (void)state_.release();
  }

  Result<Buffer> acquire() override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("write queue"));
    return state_->acquire();
  }
  void give_back(Buffer buffer) override {
    if (owner_.is_here()) state_->give_back(buffer);
  }
  Result<uint64_t> submit(Buffer buffer, int64_t offset_bytes, int64_t length_bytes) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("write queue"));
    return state_->submit(buffer, offset_bytes, length_bytes);
  }
  Status wait(uint64_t number) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("write queue"));
    return state_->wait(number);
  }
  void drop(uint64_t number) override {
    if (owner_.is_here()) state_->drop(number);
  }
  void forget() override {
    if (owner_.is_here()) state_->forget();
  }
  uint64_t written() const override { return owner_.is_here() ? state_->written() : 0; }
  int64_t resident_bytes() const override { return state_->resident_bytes(); }
  std::span<std::byte> memory() const override { return state_->memory(); }
  uint64_t bytes_written() const override { return owner_.is_here() ? state_->bytes_written() : 0; }
  double blocked_seconds() const override {
    return owner_.is_here() ? state_->blocked_seconds() : 0;
  }

 private:
  OwnerProcess owner_;
  std::unique_ptr<QueueState> state_;
};

}  // namespace

Result<std::unique_ptr<WriteQueue>> WriteQueue::create(DataFile* file,
                                                       const WriteQueueOptions& options) {
  if (options.buffers < 1 || options.buffer_bytes < kBufferAlignment ||
      options.buffer_bytes % kBufferAlignment != 0) {
    return Status::invalid(
        "write queue: buffers must be at least 1 and buffer_bytes a multiple of " +
        std::to_string(kBufferAlignment) + ", got " + std::to_string(options.buffers) + " and " +
        std::to_string(options.buffer_bytes));
  }
  auto state = std::make_unique<QueueState>(file, options);
  KVSWAP_RETURN_IF_ERROR(state->start());
  return std::unique_ptr<WriteQueue>(std::make_unique<ThreadedWriteQueue>(std::move(state)));
}

}  // namespace kvswap
