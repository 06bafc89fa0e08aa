#include "io/reader_backends.h"

#if KVSWAP_HAS_URING

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "io/batch_reader.h"
#include "io/io_thread.h"
#include "io/read_failure.h"
#include "io/uring_ring.h"

namespace kvswap {
namespace {

constexpr int kPauseMicroseconds = 200;

/// Reads through io_uring: one thread of ours owns the ring and keeps up to `depth` reads in
/// flight, so that a batch larger than the depth makes progress while its owner computes.
///
/// Who owns what: between submit() and `is_done` a batch belongs to the ring's thread, except for
/// `is_done`, which `mutex_` guards like the table and the inbox.
///
/// A ring that fails for good, as in a sandbox entered after it was opened, is left: the thread
/// waits for what the kernel has, and reads the rest and all that follows itself, one by one.
class UringReader final : public BatchReader {
 public:
  UringReader(const DataFile& file, const ReaderOptions& options)
      : BatchReader(file, options), slots_(static_cast<size_t>(options.depth)) {
    free_slots_.reserve(slots_.size());
    for (size_t slot = 0; slot < slots_.size(); ++slot) free_slots_.push_back(slot);
  }

  ~UringReader() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake();
    thread_.join();
  }

  Status start() {
    Result<std::thread> thread = start_io_thread("kvswap-uring", [this] { run(); });
    if (!thread.is_ok()) return thread.status();
    thread_ = std::move(thread.value());
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return opened_.has_value(); });
    if (opened_->is_ok()) return Status::ok();
    lock.unlock();
    thread_.join();
    return *opened_;
  }

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    KVSWAP_RETURN_IF_ERROR(check_reads(file_, reads));
    Ticket ticket = 0;
    bool must_wake = false;
    {
      const std::lock_guard lock(mutex_);
      inbox_.reserve(inbox_.size() + 1);  // a batch that is known has its place
      ReadBatch& batch = batches_.add(reads);
      ticket = batch.ticket;
      ++counters_.batches;
      if (batch.is_done) return ticket;
      inbox_.push_back(&batch);
      must_wake = std::exchange(asleep_, false);
    }
    if (must_wake) wake();
    return ticket;
  }

  std::string name() const override { return "uring"; }

 private:
  struct Slot {
    ReadBatch* batch = nullptr;
    ReadProgress* read = nullptr;
    Span span;  // where there is a timeline
  };

  void run() {
    Status opened = ring_.open(file_.fd(), static_cast<int>(slots_.size()));
    const bool works = opened.is_ok();
    {
      const std::lock_guard lock(mutex_);
      opened_ = std::move(opened);
    }
    done_.notify_all();
    if (!works) return;
    Status ring = Status::ok();
    while (ring.is_ok() && take_work()) {
      start_reads();
      if (may_sleep()) ring = ring_.submit_and_wait();
      reap();
    }
    if (!ring.is_ok()) run_without_ring(ring);
    ring_.close();
  }

  /// Both: the thread may have left the ring since it fell asleep.
  void wake() {
    ring_.wake();
    work_.notify_one();
  }

  size_t reap() {
    size_t count = 0;
    ring_.reap([&](uint64_t slot, int result) {
      ++count;
      complete(slot, result);
    });
    pause();
    return count;
  }

  /// Once for all that need it: this thread serves every read.
  void pause() {
    if (std::exchange(needs_pause_, false)) ReadProgress::pause();
  }

  void run_without_ring(const Status& reason) {
    log_line("kvswap: " + reason.message() + ". Reads go on without io_uring, one at a time.");
    has_ring_ = false;
    const std::vector<uint64_t> untaken = ring_.untaken();
    size_t in_kernel = slots_.size() - free_slots_.size() - untaken.size();
    while (in_kernel > 0) {
      const size_t completed = reap();
      in_kernel -= completed;
      if (completed == 0) ::usleep(kPauseMicroseconds);
    }
    for (const uint64_t slot : untaken) read_now(slot);
    while (take_work()) {
      if (active_.empty()) {
        std::unique_lock lock(mutex_);
        asleep_ = true;
        work_.wait(lock, [&] { return !inbox_.empty() || stopping_; });
      } else {
        start_reads();
      }
    }
  }

  /// Publishes finished batches, takes new ones; false when the reader closes and all is quiet.
  bool take_work() {
    std::unique_lock lock(mutex_);
    asleep_ = false;
    counted_.calls += ring_.take_calls();
    add(std::exchange(counted_, {}), counters_);
    bool any_finished = false;
    std::erase_if(active_, [&](ReadBatch* batch) {
      if (!batch->is_finished()) return false;
      batch->is_done = true;
      return any_finished = true;
    });
    const bool has_room = take_inbox();
    const bool stopping = stopping_;
    lock.unlock();
    if (any_finished) done_.notify_all();
    if (!has_room) ReadProgress::pause();
    if (!stopping) return true;
    for (ReadBatch* batch : active_) batch->next = batch->reads.size();
    return free_slots_.size() < slots_.size();
  }

  /// False: there is no memory for it now, and it stays for the next look. Guarded by mutex_.
  bool take_inbox() {
    try {
      active_.insert(active_.end(), inbox_.begin(), inbox_.end());
    } catch (const std::bad_alloc&) {
      return false;
    }
    inbox_.clear();
    return true;
  }

  /// Fills the ring up to its depth; batches in their order.
  void start_reads() {
    for (ReadBatch* batch : active_) {
      while (batch->has_unstarted() && !free_slots_.empty()) {
        const size_t slot = free_slots_.back();
        free_slots_.pop_back();
        ReadProgress& read = batch->reads[batch->next++];
        slots_[slot] = {batch, &read, span_of_read(batch->ticket, read)};
        if (timeline_ != nullptr) slots_[slot].span.begin_ns = Timeline::now_ns();
        ++batch->started;
        prepare(slot);
      }
    }
  }

  void prepare(size_t slot) {
    if (!has_ring_) return read_now(slot);
    const ReadProgress::Call call = slots_[slot].read->next_call(call_bytes_max_);
    ring_.prepare_read(call, file_.place_of(call.offset_bytes), slot);
    ++counted_.reads;
  }

  void read_now(size_t slot) { end(slot, read_whole(*slots_[slot].read, counted_)); }

  /// A batch that came since the last look is taken before waiting.
  bool may_sleep() {
    const std::lock_guard lock(mutex_);
    asleep_ = inbox_.empty();
    return asleep_;
  }

  void complete(size_t slot, int result) {
    const ReadProgress::Next next = take(*slots_[slot].read, result);
    if (next == ReadProgress::Next::kCallAgain) return prepare(slot);
    end(slot, next);
  }

  ReadProgress::Next take(ReadProgress& read, int64_t result) {
    if (result > 0) counted_.bytes += static_cast<uint64_t>(result);
    const ReadProgress::Next next = read.apply(result, alignment_bytes_);
    if (next == ReadProgress::Next::kCallAgain) {
      ++counted_.retries;
      needs_pause_ |= read.needs_pause();
    }
    return next;
  }

  void end(size_t slot, ReadProgress::Next next) {
    auto& [batch, read, span] = slots_[slot];
    if (timeline_ != nullptr) {
      span.end_ns = Timeline::now_ns();
      timeline_->record(span);
    }
    if (next == ReadProgress::Next::kFailed) batch->fail(read_failure(*read, file_));
    batch->ended();
    free_slots_.push_back(slot);
  }

  // Of the ring's thread alone.
  UringRing ring_;
  bool has_ring_ = true;
  bool needs_pause_ = false;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::vector<ReadBatch*> active_;
  ReaderCounters counted_;

  // Guarded by mutex_.
  std::condition_variable work_;  // for a thread that has left its ring
  std::vector<ReadBatch*> inbox_;
  std::optional<Status> opened_;
  bool asleep_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<BlockReader>> make_uring_reader(const DataFile& file,
                                                       const ReaderOptions& options) {
  auto reader = std::make_unique<UringReader>(file, options);
  KVSWAP_RETURN_IF_ERROR(reader->start());
  return std::unique_ptr<BlockReader>(std::move(reader));
}

Status check_uring() {
  UringRing ring;
  return ring.open(STDIN_FILENO, 1);
}

}  // namespace kvswap

#else

namespace kvswap {

Status check_uring() {
  return Status::storage(
      "io_uring: this build must have liburing, but it was made without; "
      "install liburing's headers and build again",
      0);
}

Result<std::unique_ptr<BlockReader>> make_uring_reader(const DataFile&, const ReaderOptions&) {
  return check_uring();
}

}  // namespace kvswap

#endif
