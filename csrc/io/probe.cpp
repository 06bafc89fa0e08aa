#include "io/probe.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <span>
#include <utility>

#include "io/error_text.h"
#include "io/file_system.h"
#include "io/readers.h"

namespace kvswap {
namespace {

constexpr int64_t kPieceBytes = 8 << 20;
constexpr int64_t kMemoryAlignment = 2 << 20;  // of a huge page, and of every O_DIRECT
constexpr int kDepthMax = 1024;
constexpr int64_t kRoomMax = 256 << 20;
constexpr double kBatchShare = 0.7;  // of a cell's time; the rest is for latencies

double now_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Of sorted values.
double quantile(std::span<const double> values, double share) {
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

/// Is done with everything at once: under a modelled device, the model alone remains.
class IdleReader final : public BlockReader {
 public:
  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    counters_.batches += 1;
    counters_.reads += reads.size();
    for (const BlockRead& read : reads) {
      for (const iovec& target : read.targets) counters_.bytes += target.iov_len;
    }
    return ++last_;
  }
  Status wait(Ticket) override { return Status::ok(); }
  bool is_done(Ticket) override { return true; }
  ReaderCounters counters() const override { return counters_; }
  std::string name() const override { return "model"; }

 private:
  Ticket last_ = 0;
  ReaderCounters counters_;
};

}  // namespace

void DiskProbe::FreeBytes::operator()(std::byte* bytes) const { std::free(bytes); }

Result<std::unique_ptr<DiskProbe>> DiskProbe::open(const ProbeOptions& options) {
  if (options.scratch_bytes < kPieceBytes) {
    return Status::invalid("disk probe: scratch_bytes must be at least " +
                           std::to_string(kPieceBytes) + ", got " +
                           std::to_string(options.scratch_bytes));
  }
  if (!options.device.empty() && !find_device_model(options.device)) {
    return Status::invalid("disk probe: device must be nvme, ufs, ufs3 or emmc, got '" +
                           options.device + "'");
  }
  std::unique_ptr<DiskProbe> probe(new DiskProbe());
  probe->options_ = options;
  Result<std::unique_ptr<DataFile>> file = DataFile::open({.directory = options.directory});
  if (!file.is_ok()) return file.status();
  probe->file_ = std::move(file.value());
  probe->facts_ = {.direct = probe->file_->is_direct(),
                   .in_memory = lies_in_memory(probe->file_->fd()),
                   .alignment_bytes = probe->file_->alignment_bytes(),
                   .fallbacks = probe->file_->fallbacks()};
  KVSWAP_RETURN_IF_ERROR(probe->make_room(kPieceBytes));
  probe->piece_ = std::move(probe->landing_);
  probe->room_ = 0;
  const Result<std::unique_ptr<BlockReader>> reader = probe->open_reader(1);
  if (!reader.is_ok()) return reader.status();
  probe->facts_.reader = reader.value()->name();
  return probe;
}

void DiskProbe::close() {
  file_.reset();
  piece_.reset();
  landing_.reset();
  room_ = filled_ = 0;
}

Status DiskProbe::check_open(const char* where) const {
  if (file_) return Status::ok();
  return Status::invalid(std::string("disk probe: ") + where +
                         " must be called before close(), got it after; open another probe");
}

Status DiskProbe::make_room(int64_t bytes) {
  if (bytes <= room_) return Status::ok();
  const int64_t rounded = (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
  landing_.reset(static_cast<std::byte*>(
      std::aligned_alloc(static_cast<size_t>(kMemoryAlignment), static_cast<size_t>(rounded))));
  room_ = landing_ ? rounded : 0;
  if (!landing_) {
    return Status::storage("disk probe: " + std::to_string(rounded) +
                               " bytes of memory must be free to read into, got " +
                               errno_text(ENOMEM) + "; end other programs",
                           ENOMEM);
  }
  // Touched now, so that no read pays for it.
  std::memset(landing_.get(), 0, static_cast<size_t>(rounded));
  return Status::ok();
}

Result<ProbeFill> DiskProbe::fill() {
  KVSWAP_RETURN_IF_ERROR(check_open("fill"));
  if (filled_ + kPieceBytes > options_.scratch_bytes) return ProbeFill{};
  for (int64_t at = 0; at < kPieceBytes; at += 8) {
    const uint64_t word = random_();
    std::memcpy(piece_.get() + at, &word, sizeof word);
  }
  const double start = now_seconds();
  KVSWAP_RETURN_IF_ERROR(file_->write(filled_, {piece_.get(), static_cast<size_t>(kPieceBytes)}));
  filled_ += kPieceBytes;
  return ProbeFill{.bytes = kPieceBytes, .seconds = now_seconds() - start};
}

Result<double> DiskProbe::sync() {
  KVSWAP_RETURN_IF_ERROR(check_open("sync"));
  const double start = now_seconds();
  if (::fdatasync(file_->fd()) != 0) {
    const int error = errno;
    return Status::storage("disk probe: the scratch file in '" + options_.directory +
                               "' must reach the disk, got " + errno_text(error) +
                               storage_hint(error),
                           error);
  }
  file_->drop_cached(0, 0);
  return now_seconds() - start;
}

Result<std::unique_ptr<BlockReader>> DiskProbe::open_reader(int depth) {
  if (!options_.device.empty()) {
    return make_modelled_reader(std::make_unique<IdleReader>(),
                                *find_device_model(options_.device));
  }
  Result<OpenedReader> opened = kvswap::open_reader(*file_, {.depth = depth});
  if (!opened.is_ok()) return opened.status();
  if (facts_.reader.empty() && !opened.value().reason.empty()) {
    facts_.fallbacks.push_back(opened.value().reason);
  }
  return std::move(opened.value().reader);
}

Status DiskProbe::check_cell(int64_t block_bytes, int depth, double seconds) const {
  if (block_bytes < 1 || block_bytes % facts_.alignment_bytes != 0 || block_bytes > filled_) {
    return Status::invalid("disk probe: block_bytes must be a multiple of " +
                           std::to_string(facts_.alignment_bytes) + " and at most the " +
                           std::to_string(filled_) + " bytes written, got " +
                           std::to_string(block_bytes));
  }
  if (depth < 1 || depth > kDepthMax || block_bytes > kRoomMax / depth) {
    return Status::invalid("disk probe: depth must be 1 to " + std::to_string(kDepthMax) +
                           " and all blocks together at most " + std::to_string(kRoomMax) +
                           " bytes, got " + std::to_string(depth) + " of " +
                           std::to_string(block_bytes));
  }
  if (!(seconds > 0 && seconds <= 60)) {
    return Status::invalid("disk probe: seconds must be above 0 and at most 60, got " +
                           std::to_string(seconds));
  }
  return Status::ok();
}

Result<ProbeCell> DiskProbe::measure(int64_t block_bytes, int depth, double seconds) {
  KVSWAP_RETURN_IF_ERROR(check_open("measure"));
  KVSWAP_RETURN_IF_ERROR(check_cell(block_bytes, depth, seconds));
  KVSWAP_RETURN_IF_ERROR(make_room(block_bytes * depth));
  draw_reads(block_bytes, depth);
  Result<std::unique_ptr<BlockReader>> reader = open_reader(depth);
  if (!reader.is_ok()) return reader.status();
  const Result<double> rate = batches_per_second(*reader.value(), kBatchShare * seconds);
  if (!rate.is_ok()) return rate.status();
  Result<std::vector<double>> taken = latencies(*reader.value(), (1 - kBatchShare) * seconds);
  if (!taken.is_ok()) return taken.status();
  std::sort(taken.value().begin(), taken.value().end());
  return ProbeCell{
      .bytes_per_second = rate.value() * static_cast<double>(block_bytes * depth),
      .latency_seconds = quantile(taken.value(), 0.5),
      .latency_p99_seconds = quantile(taken.value(), 0.99),
  };
}

void DiskProbe::draw_reads(int64_t block_bytes, int depth) {
  targets_.resize(static_cast<size_t>(depth));
  reads_.resize(static_cast<size_t>(depth));
  const auto blocks = static_cast<uint64_t>(filled_ / block_bytes);
  for (size_t index = 0; index < reads_.size(); ++index) {
    targets_[index] = {landing_.get() + static_cast<int64_t>(index) * block_bytes,
                       static_cast<size_t>(block_bytes)};
    reads_[index] = {.offset_bytes = static_cast<int64_t>(random_() % blocks) * block_bytes,
                     .targets = {&targets_[index], 1}};
  }
}

Result<double> DiskProbe::batches_per_second(BlockReader& reader, double seconds) {
  const auto block = static_cast<int64_t>(targets_[0].iov_len);
  const auto depth = static_cast<int>(targets_.size());
  double start = now_seconds();
  double end = start + seconds;
  // The first one wakes the disk and is not counted.
  for (int64_t batches = -1;; ++batches) {
    if (batches == 0) start = now_seconds();
    if (batches >= 2 && now_seconds() >= end) {
      return static_cast<double>(batches) / (now_seconds() - start);
    }
    draw_reads(block, depth);
    const Result<Ticket> ticket = reader.submit(reads_);
    if (!ticket.is_ok()) return ticket.status();
    KVSWAP_RETURN_IF_ERROR(reader.wait(ticket.value()));
  }
}

Result<std::vector<double>> DiskProbe::latencies(BlockReader& reader, double seconds) {
  struct Flying {
    Ticket ticket;
    double since;
    size_t index;
  };
  std::vector<double> taken;
  std::deque<Flying> flying;
  const auto blocks = static_cast<uint64_t>(filled_) / targets_[0].iov_len;
  const double end = now_seconds() + seconds;
  const auto submit = [&](size_t index) -> Status {
    reads_[index].offset_bytes = static_cast<int64_t>(random_() % blocks * targets_[index].iov_len);
    const double since = now_seconds();
    const Result<Ticket> ticket = reader.submit({&reads_[index], 1});
    if (!ticket.is_ok()) return ticket.status();
    flying.push_back({ticket.value(), since, index});
    return Status::ok();
  };
  for (size_t index = 0; index < reads_.size(); ++index) KVSWAP_RETURN_IF_ERROR(submit(index));
  while (!flying.empty()) {
    const Flying first = flying.front();
    flying.pop_front();
    KVSWAP_RETURN_IF_ERROR(reader.wait(first.ticket));
    taken.push_back(now_seconds() - first.since);
    if (now_seconds() < end) KVSWAP_RETURN_IF_ERROR(submit(first.index));
  }
  return taken;
}

}  // namespace kvswap
