#include "io/batch_reader.h"

#include <string>

#include "io/syscalls.h"
#include "io/wait_policy.h"

namespace kvswap {

BatchReader::BatchReader(const DataFile& file, const ReaderOptions& options)
    : file_(file),
      alignment_bytes_(file.is_direct() ? file.alignment_bytes() : 1),
      call_bytes_max_(options.call_bytes_max),
      timeline_(options.timeline),
      patience_(options.patience) {}

Status BatchReader::wait(Ticket ticket) {
  static const WaitPolicy usual;
  std::unique_lock lock(mutex_);
  const ReadBatch* batch = batches_.find(ticket);
  if (batch == nullptr) {
    return Status::invalid("wait: the ticket must be in flight and not waited for before, got " +
                           std::to_string(ticket));
  }
  KVSWAP_RETURN_IF_ERROR((patience_ == nullptr ? usual : *patience_)
                             .wait(
                                 lock, done_, [&] { return batch->is_done; },
                                 [&] { return batch->progressed_ns.load(); },
                                 [&] { return batch->describe(file_.directory()); }));
  return batches_.take(ticket);
}

bool BatchReader::is_done(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const ReadBatch* batch = batches_.find(ticket);
  return batch == nullptr || batch->is_done;
}

ReaderCounters BatchReader::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

ReadProgress::Next BatchReader::read_whole(ReadProgress& read, ReaderCounters& counted) const {
  ReadProgress::Next next;
  do {
    const ReadProgress::Call call = read.next_call(call_bytes_max_);
    const FilePlace place = file_.place_of(call.offset_bytes);
    const int64_t result =
        syscalls().preadv(place.fd, call.targets, call.targets_count, place.offset_bytes);
    next = read.apply(result, alignment_bytes_);
    if (next == ReadProgress::Next::kCallAgain && read.needs_pause()) ReadProgress::pause();
    ++counted.reads;
    ++counted.calls;
    counted.bytes += result > 0 ? static_cast<uint64_t>(result) : 0;
    counted.retries += next == ReadProgress::Next::kCallAgain;
  } while (next == ReadProgress::Next::kCallAgain);
  return next;
}

void BatchReader::add(const ReaderCounters& counted, ReaderCounters& to) {
  to.batches += counted.batches;
  to.reads += counted.reads;
  to.bytes += counted.bytes;
  to.retries += counted.retries;
  to.calls += counted.calls;
}

}  // namespace kvswap
