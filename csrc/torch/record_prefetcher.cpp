#include "torch/record_prefetcher.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "io/anonymous_file.h"
#include "io/read_only_file.h"
#include "io/wait_policy.h"

namespace kvswap {
namespace {

constexpr size_t kMemoryAlignment = 4096;  // of every buffer, whatever the file asks

/// [bytes] uint8 that O_DIRECT may read into.
at::Tensor aligned_bytes(int64_t bytes) {
  const size_t size = std::max<size_t>(1, (bytes + kMemoryAlignment - 1) / kMemoryAlignment);
  void* memory = std::aligned_alloc(kMemoryAlignment, size * kMemoryAlignment);
  if (memory == nullptr) throw std::bad_alloc();
  return at::from_blob(memory, {bytes}, [](void* held) { std::free(held); }, at::kByte);
}

Status failed(const PrefetcherOptions& options, const char* what, int number) {
  return Status::storage("prefetch_open: '" + options.path + "' must be " + what + ", got " +
                             std::strerror(number) + " (errno " + std::to_string(number) + ")",
                         number, options.path);
}

}  // namespace

RecordPrefetcher::RecordPrefetcher(PrefetcherOptions options, std::unique_ptr<DataFile> file,
                                   int64_t records)
    : options_(std::move(options)), file_(std::move(file)), records_(records) {}

Result<std::unique_ptr<RecordPrefetcher>> RecordPrefetcher::open(const PrefetcherOptions& options) {
  OwnedFd fd(::open(options.path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return failed(options, "a file to read", errno);
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0) return failed(options, "a file to read", errno);
  if (!S_ISREG(facts.st_mode)) return failed(options, "a plain file", EINVAL);
  const int64_t records =
      std::max<int64_t>(0, (facts.st_size - options.first_byte) / options.record_bytes);
  // The largest power of two that divides both, since O_DIRECT needs each to be a multiple.
  const int64_t unit = options.first_byte == 0
                           ? options.record_bytes
                           : std::min(options.record_bytes & -options.record_bytes,
                                      options.first_byte & -options.first_byte);
  auto file = make_read_only_file(std::move(fd), {.directory = options.path,
                                                  .wants_direct = options.mode != IoMode::kBuffered,
                                                  .unit_bytes = unit});
  if (options.mode == IoMode::kDirect && !file->is_direct()) {
    return Status::invalid(
        "prefetch_open: io='direct' must have a file system that takes O_DIRECT, and record_bytes "
        "and first_byte that are multiples of its blocks, got " +
        std::to_string(options.record_bytes) + " and " + std::to_string(options.first_byte) +
        "; pad the records, or use io='auto'");
  }
  std::unique_ptr<RecordPrefetcher> made(new RecordPrefetcher(options, std::move(file), records));
  auto opened = open_reader(*made->file_, {.kind = options.reader, .depth = options.depth});
  if (!opened.is_ok()) return opened.status();
  if (!opened.value().reason.empty()) log_line("prefetch_open: " + opened.value().reason);
  made->reader_ = std::move(opened.value().reader);
  return made;
}

Status RecordPrefetcher::begin(Batch& batch) {
  const int64_t size = options_.record_bytes;
  const auto count = static_cast<int64_t>(batch.records.size());
  batch.bytes = aligned_bytes(count * size);
  if (count == 0) return Status::ok();
  std::vector<iovec> targets;  // of one read each, neighbours in the file joined
  std::vector<int64_t> firsts;
  auto* memory = static_cast<char*>(batch.bytes.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && batch.records[i] == batch.records[i - 1] + 1) {
      targets.back().iov_len += size;
    } else {
      firsts.push_back(batch.records[i]);
      targets.push_back({memory + i * size, static_cast<size_t>(size)});
    }
  }
  std::vector<BlockRead> reads(targets.size());
  for (size_t i = 0; i < reads.size(); ++i) {
    reads[i] = {options_.first_byte + firsts[i] * size, {&targets[i], 1}};
  }
  auto ticket = reader_->submit(reads);
  if (!ticket.is_ok()) {
    batch.bytes.reset();
    return ticket.status();
  }
  batch.ticket = ticket.value();
  ++in_flight_;
  return Status::ok();
}

void RecordPrefetcher::forget_oldest() {
  for (auto it = batches_.begin(); batches_.size() > kTicketsMax && it != batches_.end();) {
    it = it->second.bytes.defined() ? std::next(it) : batches_.erase(it);
  }
}

Result<int64_t> RecordPrefetcher::submit(const std::vector<int64_t>& records) {
  const std::lock_guard lock(mutex_);
  for (const int64_t record : records) {
    if (record < 0 || record >= records_) {
      return Status::invalid("prefetch_submit: records must be 0.." + std::to_string(records_ - 1) +
                             ", got " + std::to_string(record));
    }
  }
  if (in_flight_ >= kInFlightMax) {
    return Status::invalid("prefetch_submit: at most " + std::to_string(kInFlightMax) +
                           " batches may be in flight, got another one; wait for some first");
  }
  Batch batch{records, {}, 0};
  KVSWAP_RETURN_IF_ERROR(begin(batch));
  batches_.emplace(next_ticket_, std::move(batch));
  forget_oldest();
  return next_ticket_++;
}

Result<RecordPrefetcher::Batch*> RecordPrefetcher::find(int64_t ticket) {
  const auto found = batches_.find(ticket);
  if (found != batches_.end()) return &found->second;
  return Status::invalid("prefetch_wait: ticket must be one of this handle's newest " +
                         std::to_string(kTicketsMax) + ", got " + std::to_string(ticket));
}

Result<int64_t> RecordPrefetcher::count_of(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  auto batch = find(ticket);
  if (!batch.is_ok()) return batch.status();
  return static_cast<int64_t>(batch.value()->records.size());
}

Result<at::Tensor> RecordPrefetcher::wait(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  auto found = find(ticket);
  if (!found.is_ok()) return found.status();
  Batch& batch = *found.value();
  if (!batch.bytes.defined()) KVSWAP_RETURN_IF_ERROR(begin(batch));
  if (batch.ticket != 0) {
    const Status status = reader_->wait(batch.ticket);
    if (status.is_pending()) return status;
    batch.ticket = 0;
    --in_flight_;
    if (!status.is_ok()) {
      batch.bytes.reset();
      return status;
    }
  }
  return std::exchange(batch.bytes, at::Tensor());
}

}  // namespace kvswap
