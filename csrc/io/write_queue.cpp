#include "io/write_queue.h"

#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/io_thread.h"
#include "io/stopwatch.h"

namespace kvswap {
namespace {

constexpr int64_t kBufferAlignment = 4096;

/// Staging memory: whole pages that a forked child does not get.
class StagingMemory {
 public:
  explicit StagingMemory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* base =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return;
    base_ = static_cast<std::byte*>(base);
    (void)::madvise(base_, bytes_, MADV_DONTFORK);
  }
  ~StagingMemory() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  StagingMemory(const StagingMemory&) = delete;
  StagingMemory& operator=(const StagingMemory&) = delete;

  std::byte* base() const { return base_; }

 private:
  size_t bytes_;
  std::byte* base_ = nullptr;
};

/// The queue itself, apart from its owner so that a forked child can leave it alone.
class QueueState {
 public:
  QueueState(DataFile* file, const WriteQueueOptions& options)
      : file_(file), options_(options), memory_(options.buffer_bytes * options.buffers) {
    const auto buffers = static_cast<size_t>(options.buffers);
    jobs_.reserve(buffers);
    free_.reserve(buffers);
    for (int index = options.buffers - 1; index >= 0; --index) free_.push_back(index);
  }

  ~QueueState() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  Status start() {
    if (memory_.base() == nullptr) {
      return Status::budget("WriteQueue: " + std::to_string(resident_bytes()) +
                            " bytes of staging memory must be available, but the system refused "
                            "them; lower buffer_bytes or buffers");
    }
    Result<std::thread> thread = start_io_thread("kvswap-write", [this] { run(); });
    if (!thread.is_ok()) return thread.status();
    thread_ = std::move(thread.value());
    return Status::ok();
  }

  Result<WriteQueue::Buffer> acquire();
  void give_back(const WriteQueue::Buffer& buffer);
  Result<uint64_t> submit(const WriteQueue::Buffer& buffer, int64_t offset_bytes,
                          int64_t length_bytes);
  Status wait(uint64_t number);

  uint64_t written() const {
    const std::lock_guard lock(mutex_);
    return written_;
  }
  uint64_t bytes_written() const {
    const std::lock_guard lock(mutex_);
    return bytes_written_;
  }
  double blocked_seconds() const {
    const std::lock_guard lock(mutex_);
    return blocked_seconds_;
  }
  int64_t resident_bytes() const { return options_.buffer_bytes * options_.buffers; }
  std::span<std::byte> memory() const {
    return {memory_.base(), static_cast<size_t>(resident_bytes())};
  }

 private:
  struct Job {
    int index = -1;
    int64_t offset_bytes = 0;
    int64_t length_bytes = 0;
  };

  std::byte* address(int index) const { return memory_.base() + options_.buffer_bytes * index; }
  Status write(const Job& job) const;
  void run();

  DataFile* const file_;
  const WriteQueueOptions options_;
  const StagingMemory memory_;
  mutable std::mutex mutex_;
  std::condition_variable work_;      // for our thread
  std::condition_variable progress_;  // for the producer
  std::vector<int> free_;
  std::vector<Job> jobs_;  // oldest first; never more than there are buffers
  uint64_t submitted_ = 0;
  uint64_t written_ = 0;
  uint64_t bytes_written_ = 0;
  double blocked_seconds_ = 0;
  Status error_;
  bool stopping_ = false;
  std::thread thread_;
};

Result<WriteQueue::Buffer> QueueState::acquire() {
  std::unique_lock lock(mutex_);
  if (free_.empty() && error_.is_ok()) {
    const auto start = std::chrono::steady_clock::now();
    progress_.wait(lock, [&] { return !free_.empty() || !error_.is_ok(); });
    blocked_seconds_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  if (!error_.is_ok()) return error_;
  const int index = free_.back();
  free_.pop_back();
  return WriteQueue::Buffer{address(index), options_.buffer_bytes, index};
}

void QueueState::give_back(const WriteQueue::Buffer& buffer) {
  const std::lock_guard lock(mutex_);
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
        "WriteQueue::submit: offset and length must be multiples of " + std::to_string(alignment) +
        " and the length within " + std::to_string(options_.buffer_bytes) + ", got offset " +
        std::to_string(offset_bytes) + " and length " + std::to_string(length_bytes));
  }
  const std::lock_guard lock(mutex_);
  KVSWAP_ASSERT(buffer.index >= 0 && buffer.index < options_.buffers);
  if (!error_.is_ok()) {
    free_.push_back(buffer.index);
    return error_;
  }
  jobs_.push_back({buffer.index, offset_bytes, length_bytes});
  work_.notify_one();
  return ++submitted_;
}

Status QueueState::wait(uint64_t number) {
  std::unique_lock lock(mutex_);
  if (number > submitted_) {
    return Status::invalid("WriteQueue::wait: the number must have been submitted, got " +
                           std::to_string(number) + " of " + std::to_string(submitted_));
  }
  progress_.wait(lock, [&] { return written_ >= number || !error_.is_ok(); });
  return error_;
}

Status QueueState::write(const Job& job) const {
  const Stopwatch watch(options_.timeline, {.kind = SpanKind::kWrite, .bytes = job.length_bytes});
  return file_->write(job.offset_bytes,
                      {address(job.index), static_cast<size_t>(job.length_bytes)});
}

void QueueState::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return !jobs_.empty() || stopping_; });
    if (jobs_.empty()) return;
    const Job job = jobs_.front();
    jobs_.erase(jobs_.begin());
    lock.unlock();
    Status status = write(job);
    lock.lock();
    free_.push_back(job.index);
    if (status.is_ok()) {
      ++written_;
      bytes_written_ += static_cast<uint64_t>(job.length_bytes);
    } else {
      // Nothing may follow a hole: what else was handed in is given up.
      error_ = std::move(status);
      for (const Job& left : jobs_) free_.push_back(left.index);
      jobs_.clear();
    }
    progress_.notify_all();
  }
}

class ThreadedWriteQueue final : public WriteQueue {
 public:
  explicit ThreadedWriteQueue(std::unique_ptr<QueueState> state) : state_(std::move(state)) {}

  ~ThreadedWriteQueue() override {
    if (!owner_.is_here()) (void)state_.release();
  }

  Result<Buffer> acquire() override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("WriteQueue::acquire"));
    return state_->acquire();
  }
  void give_back(Buffer buffer) override {
    if (owner_.is_here()) state_->give_back(buffer);
  }
  Result<uint64_t> submit(Buffer buffer, int64_t offset_bytes, int64_t length_bytes) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("WriteQueue::submit"));
    return state_->submit(buffer, offset_bytes, length_bytes);
  }
  Status wait(uint64_t number) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("WriteQueue::wait"));
    return state_->wait(number);
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
        "WriteQueue: buffers must be at least 1 and buffer_bytes a multiple of " +
        std::to_string(kBufferAlignment) + ", got " + std::to_string(options.buffers) + " and " +
        std::to_string(options.buffer_bytes));
  }
  auto state = std::make_unique<QueueState>(file, options);
  KVSWAP_RETURN_IF_ERROR(state->start());
  return std::unique_ptr<WriteQueue>(std::make_unique<ThreadedWriteQueue>(std::move(state)));
}

}  // namespace kvswap
