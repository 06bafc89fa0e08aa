#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/block_reader.h"

namespace kvswap {

/// One record to read and where it lands.
struct Placement {
  int64_t offset_bytes = 0;
  int64_t length_bytes = 0;
  void* target = nullptr;
};

struct MergeOptions {
  int64_t gap_bytes_max = 16 << 10;  // neighbours closer than this become one read
  int64_t merged_bytes_max = 256 << 10;
  void* discard_buffer = nullptr;  // gap_bytes_max bytes, aligned: where gaps land
};

/// The reads that fetch `placements`, neighbours merged, gaps landing in the scrap area.
///
/// Owns the iovec arrays that its BlockReads point to; reusable: build() keeps the capacity, so a
/// steady state allocates nothing. Worth it where a read costs more than the bytes of the gap
/// (bandwidth / IOPS).
class MergedReads {
 public:
  /// Sorts `placements` by offset in place. They must not overlap.
  void build(std::span<Placement> placements, const MergeOptions& options);
  std::span<const BlockRead> reads() const { return reads_; }
  int64_t gap_bytes() const { return gap_bytes_; }

 private:
  std::vector<BlockRead> reads_;
  std::vector<iovec> targets_;
  int64_t gap_bytes_ = 0;
};

}  // namespace kvswap
