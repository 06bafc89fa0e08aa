#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "io/block_reader.h"
#include "io/data_file.h"

namespace kvswap {

struct ProbeOptions {
  std::string directory;      // must exist and be writable
  std::string device = "";    // a modelled device's name; empty: the disk as it is
  int64_t scratch_bytes = 0;  // most that the scratch file may take
};

/// What it took to write so many bytes.
struct ProbeFill {
  int64_t bytes = 0;  // 0: the file is as large as it may be
  double seconds = 0;
};

/// What is measured, and how.
struct ProbeFacts {
  bool direct = false;     // O_DIRECT; else the figures are of buffered reads
  bool in_memory = false;  // the folder lies in memory (tmpfs, ramfs)
  int64_t alignment_bytes = 0;
  std::string reader = "";
  std::vector<std::string> fallbacks = {};  // sentences; empty when nothing is missing
};

/// Random reads of one size, so many at a time.
struct ProbeCell {
  double bytes_per_second = 0;  // of batches submitted together and waited for together
  double latency_seconds = 0;   // median of one read, with so many always in flight
  double latency_p99_seconds = 0;
};

/// Measures a disk with the session's own reader, on a scratch file that has no name.
///
/// States: fill() until it writes nothing, sync(), then measure() any number of times. Each call is
/// short, so that a caller can look up in between. A modelled device reads nothing: its figures
/// are the model's alone, whatever the disk underneath; only what is written is this disk's.
///
/// After close(), which the destructor does too, the file is gone and every call is refused.
///
/// Thread rules: one thread at a time.
class DiskProbe {
 public:
  static Result<std::unique_ptr<DiskProbe>> open(const ProbeOptions& options);

  /// Writes the next piece, which does not compress; the seconds are of writing alone.
  Result<ProbeFill> fill();
  /// Waits until the disk has all of it; returns the seconds.
  Result<double> sync();

  /// Reads for about `seconds`, but at least a batch to warm up and two more.
  Result<ProbeCell> measure(int64_t block_bytes, int depth, double seconds);

  void close();

  const ProbeFacts& facts() const { return facts_; }
  int64_t filled_bytes() const { return filled_; }
  /// For tests: -1 after close().
  int fd() const { return file_ ? file_->fd() : -1; }

 private:
  struct FreeBytes {
    void operator()(std::byte* bytes) const;
  };
  using Landing = std::unique_ptr<std::byte, FreeBytes>;

  DiskProbe() = default;
  Result<std::unique_ptr<BlockReader>> open_reader(int depth);
  Status make_room(int64_t bytes);
  void draw_reads(int64_t block_bytes, int depth);
  Status check_open(const char* where) const;
  Status check_cell(int64_t block_bytes, int depth, double seconds) const;
  Result<double> batches_per_second(BlockReader& reader, double seconds);
  Result<std::vector<double>> latencies(BlockReader& reader, double seconds);

  ProbeOptions options_;
  std::unique_ptr<DataFile> file_;
  int64_t filled_ = 0;
  ProbeFacts facts_;
  std::mt19937_64 random_{1};
  Landing piece_;    // what is written
  Landing landing_;  // what is read into: room_ bytes
  int64_t room_ = 0;
  std::vector<iovec> targets_;
  std::vector<BlockRead> reads_;
};

}  // namespace kvswap
