#include "io/read_batch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "io/wait_policy.h"

namespace kvswap {

void ReadBatch::fail(Status failure) {
  if (status.is_ok()) status = std::move(failure);
  next = reads.size();
}

void ReadBatch::ended() {
  --started;
  progressed_ns = WaitPolicy::now_ns();
}

std::string ReadBatch::describe(const std::string& directory) const {
  return "read of " + std::to_string(bytes) + " bytes in " + std::to_string(reads_asked) +
         " places from offset " + std::to_string(first_offset_bytes) +
         " on of the session file in '" + directory + "'";
}

ReadBatch& ReadBatchTable::add(std::span<const BlockRead> reads) {
  if (free_.empty()) free_.push_back(std::make_unique<ReadBatch>());
  ReadBatch& batch = *free_.back();
  live_.push_back(std::move(free_.back()));
  free_.pop_back();

  batch.ticket = ++last_ticket_;
  batch.targets.clear();
  batch.reads.clear();
  batch.next = 0;
  batch.started = 0;
  batch.status = Status::ok();
  batch.is_done = reads.empty();
  batch.progressed_ns = WaitPolicy::now_ns();
  batch.reads_asked = reads.size();
  batch.bytes = 0;
  batch.first_offset_bytes = reads.empty() ? 0 : reads.front().offset_bytes;
  for (const BlockRead& read : reads) {
    batch.targets.insert(batch.targets.end(), read.targets.begin(), read.targets.end());
  }
  std::span<iovec> rest(batch.targets);
  for (const BlockRead& read : reads) {
    batch.reads.emplace_back(read.offset_bytes, rest.first(read.targets.size()));
    batch.bytes += batch.reads.back().missing_bytes();
    rest = rest.subspan(read.targets.size());
  }
  return batch;
}

ReadBatch* ReadBatchTable::find(Ticket ticket) {
  for (const auto& batch : live_) {
    if (batch->ticket == ticket) return batch.get();
  }
  return nullptr;
}

Status ReadBatchTable::take(Ticket ticket) {
  const auto place = std::find_if(live_.begin(), live_.end(),
                                  [&](const auto& batch) { return batch->ticket == ticket; });
  KVSWAP_ASSERT(place != live_.end() && (*place)->is_done);
  Status status = std::move((*place)->status);
  free_.push_back(std::move(*place));
  live_.erase(place);
  return status;
}

Status check_reads(const DataFile& file, std::span<const BlockRead> reads) {
  const int64_t alignment = file.is_direct() ? file.alignment_bytes() : 1;
  const auto mask = static_cast<uint64_t>(alignment - 1);
  for (const BlockRead& read : reads) {
    if (read.targets.empty() || read.targets.size() > static_cast<size_t>(kTargetsMax)) {
      return Status::invalid("submit: a read must have 1 to " + std::to_string(kTargetsMax) +
                             " targets, got " + std::to_string(read.targets.size()));
    }
    if (read.offset_bytes < 0) {
      return Status::invalid("submit: an offset must be at least 0, got " +
                             std::to_string(read.offset_bytes));
    }
    uint64_t bits = static_cast<uint64_t>(read.offset_bytes);
    bool any_empty = false;
    for (const iovec& target : read.targets) {
      bits |= reinterpret_cast<uintptr_t>(target.iov_base) | target.iov_len;
      any_empty |= target.iov_len == 0 || target.iov_base == nullptr;
    }
    if (any_empty) {
      return Status::invalid(
          "submit: every target must have an address and a length, got none "
          "in the read at offset " +
          std::to_string(read.offset_bytes));
    }
    if ((bits & mask) != 0) {
      return Status::invalid("submit: offset, addresses and lengths must be multiples of " +
                             std::to_string(alignment) + " under O_DIRECT, got others in the " +
                             "read at offset " + std::to_string(read.offset_bytes));
    }
  }
  return Status::ok();
}

}  // namespace kvswap
