#include "io/kernel.h"
#include "io/read_batch.h"
#include "io/reader_backends.h"
#include "io/stopwatch.h"

namespace kvswap {
namespace {

/// Reads within submit(), one read after the other: the reference for the others.
class SyncReader final : public BlockReader {
 public:
  SyncReader(const DataFile& file, const ReaderOptions& options)
      : file_(file),
        alignment_bytes_(file.is_direct() ? file.alignment_bytes() : 1),
        call_bytes_max_(options.call_bytes_max),
        timeline_(options.timeline),
        patience_(options.patience) {}

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    KVSWAP_RETURN_IF_ERROR(check_reads(file_, reads));
    ReadBatch& batch = batches_.add(reads);
    ++counters_.batches;
    while (batch.has_unstarted()) {
      const Status wanted = patience_ == nullptr ? Status::ok() : patience_->check();
      if (!wanted.is_ok()) {
        // Nothing is in flight: the batch is gone with the call.
        batch.is_done = true;
        (void)batches_.take(batch.ticket).is_ok();
        return wanted;
      }
      read_one(batch, batch.reads[batch.next++]);
    }
    batch.is_done = true;
    return batch.ticket;
  }

  Status wait(Ticket ticket) override {
    if (batches_.find(ticket) == nullptr) return unknown_ticket(ticket);
    return batches_.take(ticket);
  }

  bool is_done(Ticket) override { return true; }
  ReaderCounters counters() const override { return counters_; }
  std::string name() const override { return "sync"; }

 private:
  void read_one(ReadBatch& batch, ReadProgress& read) {
    const Stopwatch watch(timeline_, span_of_read(batch.ticket, read));
    ReadProgress::Next next;
    do {
      const ReadProgress::Call call = read.next_call(call_bytes_max_);
      const FilePlace place = file_.place_of(call.offset_bytes);
      const int64_t result =
          kernel().preadv(place.fd, call.targets, call.targets_count, place.offset_bytes);
      next = read.apply(result, alignment_bytes_);
      if (next == ReadProgress::Next::kCallAgain && read.needs_pause()) read.pause();
      ++counters_.reads;
      counters_.bytes += result > 0 ? static_cast<uint64_t>(result) : 0;
      counters_.retries += next == ReadProgress::Next::kCallAgain;
    } while (next == ReadProgress::Next::kCallAgain);
    if (next == ReadProgress::Next::kFailed) batch.fail(read.failure(file_.directory()));
  }

  const DataFile& file_;
  const int64_t alignment_bytes_;
  const int64_t call_bytes_max_;
  Timeline* const timeline_;
  const Patience* const patience_;
  ReadBatchTable batches_;
  ReaderCounters counters_;
};

}  // namespace

std::unique_ptr<BlockReader> make_sync_reader(const DataFile& file, const ReaderOptions& options) {
  return std::make_unique<SyncReader>(file, options);
}

}  // namespace kvswap
