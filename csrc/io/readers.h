#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/timeline.h"
#include "io/wait_policy.h"

namespace kvswap {

enum class ReaderKind { kAuto, kUring, kThreads, kSync };

/// "auto", "uring", "threads" or "sync"; nothing for another word.
std::optional<ReaderKind> parse_reader_kind(std::string_view word);

struct ReaderOptions {
  ReaderKind kind = ReaderKind::kAuto;  // kAuto: io_uring if it works on a disk, else threads
  int depth = 64;                       // reads in flight at most, 1..1024
  int threads = 8;                      // for kThreads, 1..256; as many as the system grants
  int64_t call_bytes_max = 1 << 30;     // longer reads take several system calls; aligned
  Timeline* timeline = nullptr;  // is notified of each read; outlives the reader; null: nobody
  const WaitPolicy* patience = nullptr;  // outlives the reader; null: its defaults
};

struct OpenedReader {
  std::unique_ptr<BlockReader> reader;
  std::string reason;  // why this one, in a sentence; empty when it is what was asked
};

/// Opens the reader that `options` asks for; the file must outlive it.
///
/// Only kAuto falls back, one rung at a time: a ring of `depth`, 64 or 16 reads, as many threads as
/// the system grants, reads within the calls. On a file system in memory it begins at threads,
/// which copy side by side. KVSWAP_IO in the environment names the rung that kAuto begins at:
/// uring, uring64, uring16, threads or sync. What is read from a MemoryFile is copied within the
/// calls, whatever is asked.
Result<OpenedReader> open_reader(const DataFile& file, const ReaderOptions& options);

/// A modelled device: what a read costs there, whatever the disk underneath.
struct DeviceModel {
  std::string name;             // "nvme", "ufs", "ufs3", "emmc"
  double latency_seconds = 0;   // of one read on an idle device
  double bytes_per_second = 0;  // shared by all reads in flight
  int depth = 1;                // reads the device serves at once
};

/// nvme, ufs (4.0), ufs3 (3.1) or emmc (5.1) with published figures; nothing for another name.
std::optional<DeviceModel> find_device_model(const std::string& name);

/// Wraps a reader so that no batch is done before the modelled device would be done with it.
/// `timeline` (may be null) is notified of the modelled reads; the inner reader should have none.
std::unique_ptr<BlockReader> make_modelled_reader(std::unique_ptr<BlockReader> inner,
                                                  const DeviceModel& model,
                                                  Timeline* timeline = nullptr);

}  // namespace kvswap
