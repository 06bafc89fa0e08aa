#include "store/record_writes.h"

#include <algorithm>

namespace kvswap {

Status RecordWrites::submit(WriteQueue::Buffer buffer, int64_t offset_bytes, int64_t length_bytes,
                            std::vector<Written> records) {
  auto number = queue_->submit(buffer, offset_bytes, length_bytes);
  if (!number.is_ok()) return number.status();
  last_write_ = number.value();
  pending_.push_back({last_write_, offset_bytes, offset_bytes + length_bytes, std::move(records)});
  forget_written();
  return Status::ok();
}

Status RecordWrites::wait_for(int64_t offset_bytes) {
  if (pending_.empty()) return Status::ok();
  forget_written();
  for (const PendingWrite& write : pending_) {
    if (offset_bytes >= write.begin_bytes && offset_bytes < write.end_bytes) {
      KVSWAP_RETURN_IF_ERROR(queue_->wait(write.number));
    }
  }
  return Status::ok();
}

Status RecordWrites::flush() { return last_write_ == 0 ? Status::ok() : queue_->wait(last_write_); }

void RecordWrites::forget_written() {
  const uint64_t written = queue_->written();
  while (!pending_.empty() && pending_.front().number <= written) pending_.pop_front();
}

void RecordWrites::drop_unread() {
  forget_written();
  // The newest first: see WriteQueue::drop().
  for (auto write = pending_.rbegin(); write != pending_.rend(); ++write) {
    const bool is_read = std::ranges::any_of(write->records, [this](const Written& record) {
      return records_.is_held(record.number, record.serial);
    });
    if (!is_read) queue_->drop(write->number);
  }
}

void RecordWrites::forget() {
  queue_->forget();
  pending_.clear();
  last_write_ = 0;
}

}  // namespace kvswap
