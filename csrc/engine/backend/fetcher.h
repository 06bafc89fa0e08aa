#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/block_reader.h"
#include "io/layered_file.h"
#include "io/read_coalescing.h"
#include "io/timeline.h"
#include "kernels/types.h"
#include "memory/page_pool.h"
#include "store/record_store.h"

namespace kvswap {

/// One record on its way to memory.
struct Load {
  int64_t sequence = 0;
  int64_t group = 0;
  int32_t page = -1;            // of the sequence's pool; -1: not a page
  bool is_ready = false;        // its bytes are verified, and unpacked
  std::byte* target = nullptr;  // where the read lands: record_bytes, aligned
  std::byte* home = nullptr;    // the page; not the target where that is a device's
};

/// The loads of one layer that travel together. Reused, so that a steady state allocates nothing.
struct Fetch {
  int64_t layer = 0;
  std::vector<Load> loads;
  Ticket ticket = 0;           // 0: nothing in flight
  bool is_unverified = false;  // landed, and not all checksums are seen to hold
  bool stays_packed = false;   // as in the file, [stored_bytes] at the begin of each target
  int lane = -1;               // of StagingBuffers; -1: none is lent
  int64_t submitted_ns = 0;
  std::vector<Placement> placements;
  // Sequences that share a past share its records: each is read once, then copied.
  struct Copy {
    const std::byte* source;
    std::byte* target;
  };
  std::vector<Copy> copies;
  MergedReads merged;

  /// Memory of one load while it is under way.
  static constexpr int64_t bytes_per_load() {
    return sizeof(Load) + sizeof(Placement) + sizeof(Copy) + 2 * sizeof(iovec) + sizeof(BlockRead);
  }
};

struct FetchCounters {
  uint64_t records = 0;
  uint64_t payload_bytes = 0;   // of records
  uint64_t gap_bytes = 0;       // read only because neighbours were merged
  uint64_t reread_records = 0;  // checksum did not hold at first
  double wait_seconds = 0;      // the caller stood still
  double hidden_seconds = 0;    // reads were under way while the caller computed
};

/// Records from the file to memory: merge, submit, wait, verify, unpack.
///
/// A record that is packed in the file lands at the end of its target, and is unpacked to the whole
/// of it. finish() serves only records whose checksum holds: a record that fails is read once more,
/// then reported as corrupt with layer, group and offset. On any error the targets hold nothing
/// that may be used; one that is_pending() leaves the fetch under way, to be finished or abandoned.
/// Not thread-safe; several fetches may be in flight.
class Fetcher {
 public:
  struct Options {
    const LayeredFile* file = nullptr;  // what is read; named in errors
    int64_t merge_gap_bytes = 0;
    int64_t merge_bytes_max = 0;
    AtEnd scrap_at_end = AtEnd::kLeft;  // what is read of others' records between those asked for
    const ParallelFor* parallel = nullptr;
    Timeline* timeline = nullptr;  // records what the caller does here; null: nobody
  };

  static Result<std::unique_ptr<Fetcher>> create(std::unique_ptr<BlockReader> reader,
                                                 RecordStore* store, const Options& options);

  /// Submits fetch.loads; nothing to do for none.
  Status submit(Fetch& fetch);
  /// Waits for and verifies what submit() started; afterwards the fetch is idle.
  Status finish(Fetch& fetch);
  /// Nobody will finish it: what is in flight keeps `memory` until it has landed, and no other
  /// fetch begins before. Idle afterwards.
  void abandon(Fetch& fetch, std::shared_ptr<void> memory);
  /// Waits for all that was abandoned.
  Status drain_abandoned();

  const FetchCounters& counters() const { return counters_; }
  const BlockReader& reader() const { return *reader_; }

 private:
  Fetcher(std::unique_ptr<BlockReader> reader, RecordStore* store, const Options& options,
          AlignedBytes discard_buffer);
  void record(SpanKind kind, const Fetch& fetch, int64_t begin_ns, int64_t end_ns);
  void drop_repeats(Fetch& fetch);
  Status complete(Fetch& fetch);
  Status verify(Fetch& fetch);
  Status reread(Fetch& fetch, Load& load);
  std::byte* landing_of(const Fetch& fetch, const Load& load) const;
  bool take(const Fetch& fetch, Load& load) const;

  struct Abandoned {
    Ticket ticket = 0;
    std::shared_ptr<void> memory;
  };

  // Before the reader, which waits for what lands there.
  AlignedBytes scrap_;
  std::vector<Abandoned> abandoned_;
  std::unique_ptr<BlockReader> reader_;
  RecordStore* store_;
  Options options_;
  FetchCounters counters_;
};

}  // namespace kvswap
