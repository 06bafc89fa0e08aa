#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/backend/fetcher.h"
#include "kernels/cuda/kernels.h"
#include "kernels/record_codec.h"
#include "memory/page_pool.h"
#include "methods/selection/selector.h"
#include "store/record_store.h"

namespace kvswap {

struct SpaceCounters {
  uint64_t copied_bytes = 0;       // of records, to the device
  double copy_seconds = 0;         // such copies under way, scatter included
  double device_wait_seconds = 0;  // the device stood still for them
};

/// Records in: loads land somewhere, then stand in their pages (Load::home).
class LoadStaging {
 public:
  virtual ~LoadStaging() = default;
  /// Host memory that records land in and are copied from, aligned to 4096; outlived by the space.
  virtual Result<std::shared_ptr<std::byte>> make_landing(int64_t bytes) = 0;
  /// Is there a landing place for `loads` more? Otherwise something lent must be published first.
  virtual bool can_acquire(int64_t loads) const = 0;
  virtual Status acquire(Fetch& fetch) = 0;
  /// What landed is in the pages for all that is called later.
  virtual Status publish(Fetch& fetch) = 0;
  /// What was lent is not needed: nothing landed.
  virtual void give_back(Fetch& fetch) = 0;
  /// Where records land that the host reads itself, in pages that hold nothing: the pages, or null
  /// where they are a device's.
  virtual std::byte* landing_in(std::byte* page) const = 0;
};

/// Records out: packed at(run), their notes at notes_at(run), sent, arrived in the run.
class StoreStaging {
 public:
  enum class Sent { kArrived, kInFlight };

  virtual ~StoreStaging() = default;
  virtual std::byte* at(const RecordStore::StagedRun& run) = 0;
  /// [count, note_bytes].
  virtual int8_t* notes_at(RecordStore::StagedRun& run) = 0;
  virtual Sent send(const RecordStore::StagedRun& run, int64_t bytes) = 0;
  /// Waits for what is on its way.
  virtual Status arrive(RecordStore::StagedRun& run) = 0;
};

/// Tokens and pages, and the attention over them. The arrays of BatchTransferArgs are the host's.
class Compute {
 public:
  virtual ~Compute() = default;
  virtual void pack(const cuda::BatchTransferArgs& args) = 0;
  /// Pages of tokens to records of e4m3; the arrays are the host's, the exponents the space's.
  virtual void encode(const RecordCodecArgs& args) = 0;
  virtual void copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;
  virtual Status upload(std::byte* to, const std::byte* host, int64_t bytes) = 0;
  virtual Status download(std::byte* host, const std::byte* from, int64_t bytes) = 0;
  /// Pages of `bytes` each, from as many that stand one after the other.
  virtual Status upload_pages(std::span<std::byte* const> pages, const std::byte* host,
                              int64_t bytes) = 0;
  /// Bytes as the host reads them: where they are, or a copy in `room`.
  virtual Result<const std::byte*> map_for_host(const std::byte* from, int64_t bytes,
                                                std::vector<std::byte>& room) = 0;

  /// Packing inside begin_chunk()..end_chunk() depends only on work queued before mark_tokens(),
  /// so it overlaps with what the caller computes after that.
  virtual void mark_tokens() {}
  virtual void begin_chunk() {}
  virtual void end_chunk() {}

  /// Tables are the host's; query and output the space's.
  virtual void attend(int64_t layer, const PagedAttentionArgs& args) = 0;
  /// Where an attention that is to be weighed leaves its log-sum-exps: `host`, which has room for
  /// them, or as many elsewhere, until the next.
  virtual float* log_sum_exps(float* host) = 0;
  /// Weights of the newest attention, with its arguments; mean and square are the host's, and are
  /// there afterwards.
  virtual Status weigh(const AttentionMassArgs& args) = 0;
  /// What callers lent for a call may be used and freed by them again.
  virtual Status hand_back() = 0;
  virtual void set_compute_stream(void* stream) = 0;
};

/// The memory that pages live in, how records get in and out, and who computes on them: the CPU in
/// its own memory, or a device. The engine decides what happens and calls it by its name here.
///
/// Pointers are the space's own unless called host; so are the tokens and queries that callers hand
/// in. Operations take effect in call order. Everything is allocated by make_pool() and reserve().
/// Not thread-safe.
class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;
  virtual std::string name() const = 0;
  virtual LoadStaging& landing() = 0;
  virtual StoreStaging& outbox() = 0;
  virtual Compute& compute() = 0;

  virtual Result<PagePool> make_pool(int64_t pages, int64_t page_bytes) = 0;
  /// What stands beside the pages, for a batch and its context; nothing is in flight.
  virtual Status reserve(int64_t batch, int64_t groups) = 0;
  /// What reserve() set aside for a selector that computes here; empty on the host.
  virtual SelectionPlace selection_place() const { return {}; }
  /// All that was called has happened.
  virtual Status finish() { return Status::ok(); }

  virtual SpaceCounters counters() const { return {}; }
  virtual int64_t device_bytes() const { return 0; }
  virtual int64_t pinned_bytes() const { return 0; }
};

/// Pages are host memory, attended where reads land.
std::unique_ptr<MemoryBackend> make_host_space(const ParallelFor* parallel, AtEnd at_end);

}  // namespace kvswap
