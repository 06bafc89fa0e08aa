#include <algorithm>
#include <memory>
#include <mutex>
#include <span>

#include "io/batch_reader.h"
#include "io/read_failure.h"
#include "io/read_pool.h"
#include "io/reader_backends.h"
#include "io/stopwatch.h"

namespace kvswap {
namespace {

constexpr size_t kReadsAtOnce = 8;  // of one thread between two looks at the table

/// Reads with the threads of its disk, one preadv each at a time; batches are started in their
/// order. A thread takes several reads of a long batch at once: locks cost more than a short read.
class ThreadReader final : public BatchReader, private ReadPool::Work {
 public:
  ThreadReader(const DataFile& file, const ReaderOptions& options)
      : BatchReader(file, options),
        threads_(static_cast<size_t>(options.threads)),
        pool_(ReadPool::of_disk(file.fd())) {}

  ~ThreadReader() override {
    std::unique_lock lock(mutex_);
    for (const auto& batch : batches_.live()) batch->next = batch->reads.size();
    done_.wait(lock, [&] { return posted_ == 0; });
  }

  Status start() { return pool_->grow(static_cast<int>(threads_)); }

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    KVSWAP_RETURN_IF_ERROR(check_reads(file_, reads));
    Ticket ticket = 0;
    size_t helpers = 0;
    {
      const std::lock_guard lock(mutex_);
      ticket = batches_.add(reads).ticket;
      ++counters_.batches;
      helpers = std::min(reads.size(), threads_ - posted_);
      posted_ += helpers;
    }
    pool_->post(this, static_cast<int>(helpers));
    return ticket;
  }

  std::string name() const override { return "threads"; }

 private:
  ReadBatch* next_batch() {
    for (const auto& batch : batches_.live()) {
      if (batch->has_unstarted()) return batch.get();
    }
    return nullptr;
  }

  bool read_some() override {
    std::unique_lock lock(mutex_);
    ReadBatch* const batch = next_batch();
    if (batch == nullptr) {
      // The last of them lets the destructor go on, which waits for the lock.
      if (--posted_ == 0) done_.notify_all();
      return false;
    }
    // Every thread gets its share, twice, so that none waits for a slow one's last reads.
    const size_t left = batch->reads.size() - batch->next;
    const size_t count = std::clamp<size_t>(left / (2 * threads_), 1, kReadsAtOnce);
    const std::span<ReadProgress> own(&batch->reads[batch->next], count);
    batch->next += count;
    batch->started += count;
    lock.unlock();
    ReaderCounters counted;
    const ReadProgress* failed = nullptr;
    for (ReadProgress& read : own) {
      const ReadProgress::Next next = make_read(batch->ticket, read, counted);
      batch->progressed_ns = WaitPolicy::now_ns();  // wait() reads it without the lock
      if (next != ReadProgress::Next::kFailed) continue;
      failed = &read;
      break;  // a batch that failed needs no more
    }
    lock.lock();
    add(counted, counters_);
    for (size_t i = 0; i < count; ++i) batch->ended();
    if (failed != nullptr) batch->fail(read_failure(*failed, file_));
    if (batch->is_finished()) {
      batch->is_done = true;
      done_.notify_all();
    }
    return true;
  }

  ReadProgress::Next make_read(Ticket ticket, ReadProgress& read, ReaderCounters& counted) const {
    const Stopwatch watch(timeline_, span_of_read(ticket, read));
    return read_whole(read, counted);
  }

  const size_t threads_;
  size_t posted_ = 0;  // how often the pool has this reader, or reads for it
  std::shared_ptr<ReadPool> pool_;
};

}  // namespace

Result<std::unique_ptr<BlockReader>> make_thread_reader(const DataFile& file,
                                                        const ReaderOptions& options) {
  auto reader = std::make_unique<ThreadReader>(file, options);
  KVSWAP_RETURN_IF_ERROR(reader->start());
  return std::unique_ptr<BlockReader>(std::move(reader));
}

}  // namespace kvswap
