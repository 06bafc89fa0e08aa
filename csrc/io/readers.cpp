#include "io/readers.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "io/file_system.h"
#include "io/io_thread.h"
#include "io/reader_backends.h"

namespace kvswap {
namespace {

constexpr uint64_t kCachedBytesMax = 64 << 20;

/// What holds for every reader: in a forked child, where our threads do not exist, calls fail and
/// the destructor leaves the copy alone; and buffered reads do not fill the page cache for good.
class GuardedReader final : public BlockReader {
 public:
  GuardedReader(std::unique_ptr<BlockReader> inner, const DataFile& file)
      : inner_(std::move(inner)), file_(file) {}

  ~GuardedReader() override {
    // Joining a thread or destroying its condition variable would hang in a forked child.
    if (!owner_.is_here()) (void)inner_.release();
  }

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("submit"));
    return inner_->submit(reads);
  }

  Status wait(Ticket ticket) override {
    KVSWAP_RETURN_IF_ERROR(owner_.check("wait"));
    Status status = inner_->wait(ticket);
    if (!file_.is_direct()) drop_cached();
    return status;
  }

  bool is_done(Ticket ticket) override { return !owner_.is_here() || inner_->is_done(ticket); }
  ReaderCounters counters() const override {
    return owner_.is_here() ? inner_->counters() : ReaderCounters{};
  }
  std::string name() const override { return inner_->name(); }

 private:
  void drop_cached() {
    const uint64_t bytes = inner_->counters().bytes;
    if (bytes - dropped_at_bytes_ < kCachedBytesMax) return;
    dropped_at_bytes_ = bytes;
    (void)::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }

  std::unique_ptr<BlockReader> inner_;
  const DataFile& file_;
  OwnerProcess owner_;
  uint64_t dropped_at_bytes_ = 0;
};

Status check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return Status::ok();
  return Status::invalid(std::string("open_reader: ") + name + " must be " + std::to_string(least) +
                         " to " + std::to_string(most) + ", got " + std::to_string(value));
}

Result<std::unique_ptr<BlockReader>> make_reader(const DataFile& file,
                                                 const ReaderOptions& options) {
  switch (options.kind) {
    case ReaderKind::kSync:
      return make_sync_reader(file, options);
    case ReaderKind::kThreads:
      return make_thread_reader(file, options);
    case ReaderKind::kUring:
    case ReaderKind::kAuto:
      break;
  }
  return make_uring_reader(file, options);
}

/// A way to read, and what its warning calls it.
struct Rung {
  const char* name;
  ReaderKind kind;
  int depth;  // of a ring
  const char* what;
};

constexpr Rung kRungs[] = {
    {"uring", ReaderKind::kUring, 1024, "a ring"},
    {"uring64", ReaderKind::kUring, 64, "a ring of 64 reads"},
    {"uring16", ReaderKind::kUring, 16, "a ring of 16 reads"},
    {"threads", ReaderKind::kThreads, 0, "threads"},
    {"sync", ReaderKind::kSync, 0, "one read after the other"},
};

constexpr const char* kInMemory = "threads";

/// Where KVSWAP_IO says to begin; nothing for an unknown name. Without a name it is the first rung,
/// or threads in memory, where a read is a copy: a ring makes it on its one thread, and threads
/// make it side by side. On 16 processors 52 MB in pieces of 16 KiB took 35 and 17 ms.
std::optional<size_t> first_rung(const DataFile& file) {
  const char* name = std::getenv("KVSWAP_IO");
  if (name == nullptr || *name == '\0')
    name = lies_in_memory(file.fd()) ? kInMemory : kRungs[0].name;
  for (size_t i = 0; i < std::size(kRungs); ++i) {
    if (std::string(kRungs[i].name) == name) return i;
  }
  return std::nullopt;
}

Result<std::unique_ptr<BlockReader>> open_best_reader(const DataFile& file, ReaderOptions options,
                                                      std::string& reason) {
  const std::optional<size_t> first = first_rung(file);
  if (!first) {
    return Status::invalid(
        "KVSWAP_IO: must be uring, uring64, uring16, threads or sync, got another word");
  }
  const int depth = options.depth;
  Status refused;
  for (size_t i = *first; i < std::size(kRungs); ++i) {
    const Rung& rung = kRungs[i];
    // A smaller ring helps against a limit on memory alone.
    const bool is_smaller_ring = i > *first && rung.kind == ReaderKind::kUring;
    if (is_smaller_ring && (refused.error_number() != ENOMEM || depth <= rung.depth)) continue;
    options.kind = rung.kind;
    options.depth = rung.kind == ReaderKind::kUring ? std::min(depth, rung.depth) : depth;
    auto reader = make_reader(file, options);
    if (reader.is_ok()) {
      if (!refused.is_ok())
        reason = refused.message() + ". Reads go through " + rung.what + " instead.";
      return reader;
    }
    if (refused.is_ok()) refused = reader.status();
  }
  return refused;
}

}  // namespace

std::optional<ReaderKind> parse_reader_kind(std::string_view word) {
  if (word == "auto") return ReaderKind::kAuto;
  if (word == "uring") return ReaderKind::kUring;
  if (word == "threads") return ReaderKind::kThreads;
  if (word == "sync") return ReaderKind::kSync;
  return std::nullopt;
}

Result<OpenedReader> open_reader(const DataFile& file, const ReaderOptions& options) {
  KVSWAP_RETURN_IF_ERROR(check_range("depth", options.depth, 1, 1024));
  KVSWAP_RETURN_IF_ERROR(check_range("threads", options.threads, 1, 256));
  KVSWAP_RETURN_IF_ERROR(
      check_range("call_bytes_max", options.call_bytes_max, file.alignment_bytes(), 1 << 30));
  if (options.call_bytes_max % file.alignment_bytes() != 0) {
    return Status::invalid("open_reader: call_bytes_max must be a multiple of " +
                           std::to_string(file.alignment_bytes()) + ", got " +
                           std::to_string(options.call_bytes_max));
  }
  OpenedReader opened;
  if (file.memory() != nullptr) {
    opened.reader = std::make_unique<GuardedReader>(make_memory_reader(file), file);
    return opened;
  }
  auto reader = options.kind == ReaderKind::kAuto ? open_best_reader(file, options, opened.reason)
                                                  : make_reader(file, options);
  if (!reader.is_ok()) return reader.status();
  opened.reader = std::make_unique<GuardedReader>(std::move(reader.value()), file);
  return opened;
}

}  // namespace kvswap
