#include "io/batch_reader.h"
#include "io/read_failure.h"
#include "io/reader_backends.h"
#include "io/stopwatch.h"

namespace kvswap {
namespace {

/// Reads within submit(), one read after the other: the reference for the others.
class SyncReader final : public BatchReader {
 public:
  SyncReader(const DataFile& file, const ReaderOptions& options) : BatchReader(file, options) {}

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

  std::string name() const override { return "sync"; }

 private:
  void read_one(ReadBatch& batch, ReadProgress& read) {
    const Stopwatch watch(timeline_, span_of_read(batch.ticket, read));
    const ReadProgress::Next next = read_whole(read, counters_);
    if (next == ReadProgress::Next::kFailed) batch.fail(read_failure(read, file_));
  }
};

}  // namespace

std::unique_ptr<BlockReader> make_sync_reader(const DataFile& file, const ReaderOptions& options) {
  return std::make_unique<SyncReader>(file, options);
}

}  // namespace kvswap
