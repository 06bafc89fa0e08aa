#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "device/table_ring.h"
#include "engine/engine_options.h"
#include "engine/landing_lanes.h"
#include "engine/page_space.h"
#include "engine/pinned_bytes.h"
#include "methods/device_selector.h"

namespace kvswap {

/// Sizes of what stands beside the pages of a session on a device.
struct DeviceRoom {
  int64_t lane_records = 0;  // of one landing lane, and of the staging on the device
  int64_t outbox_bytes = 0;
  int64_t scratch_bytes = 0;  // of attention
  int64_t segment_bytes = 0;  // of the table ring
  DeviceSelector::Room choice;
};
DeviceRoom device_room(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t groups);

/// The same in bytes, by place.
struct DeviceNeed {
  int64_t device = 0;  // landing and sending staging, tables, choices, scratch
  int64_t pinned = 0;  // host memory that copies go through; write buffers are staging
};

/// For a batch and `groups` sealed groups of a sequence: a multiple of groups_unit().
DeviceNeed device_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t groups);
/// Groups are made room for in multiples of this, so that few steps find none.
int64_t groups_unit(const EngineOptions& options);

/// Pages are device memory. Four streams work beside each other, as Stream tells; the host waits
/// for chosen ids, for disks, and for copies out of buffers it needs again, never for a whole
/// device.
///
/// Order between streams, each by an event:
///   compute -> load    a page is overwritten after the last attention of its layer
///   load -> compute    attention runs when the records have come
///   compute -> score   a query is projected, and summaries are written, before they are used
///   compute -> write   tokens exist before they are packed
///   write -> compute   tokens may be freed when they are packed
class DeviceSpace final : public PageSpace {
 public:
  /// staging: the write buffers; pinned as long as the space lives, which the caller's store
  /// outlives.
  static Result<std::unique_ptr<DeviceSpace>> create(const EngineOptions& options,
                                                     int64_t record_bytes,
                                                     std::span<std::byte> staging);
  ~DeviceSpace() override;

  std::string name() const override { return device_->name(); }
  bool is_host() const override { return false; }
  Result<PagePool> make_pool(int64_t pages, int64_t page_bytes) override;
  Result<std::shared_ptr<std::byte>> make_landing(int64_t bytes) override;
  std::unique_ptr<LowRankSelector> make_selector(const LowRankOptions& options) override;
  Status reserve(int64_t batch, int64_t groups) override;

  bool can_lend(int64_t loads) const override { return loads == 0 || lanes_.has_room(); }
  Status lend(Fetch& fetch) override { return lanes_.lend(fetch); }
  Status publish(Fetch& fetch) override;
  void give_back(Fetch& fetch) override { lanes_.release(fetch); }

  void pack(const cuda::BatchTransferArgs& args) override;
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  Status upload(std::byte* to, const std::byte* host, int64_t bytes) override;
  Status download(std::byte* host, const std::byte* from, int64_t bytes) override;

  std::byte* outbox(const RecordStore::StagedRun& run) override;
  void send(const RecordStore::StagedRun& run, int64_t bytes) override;
  Status arrive(const RecordStore::StagedRun& run) override;

  void mark_tokens() override;
  void begin_chunk() override;
  void end_chunk() override;

  void attend(int64_t layer, const PagedAttentionArgs& args) override;
  Status hand_back() override { return device_->hand_back(); }
  void set_compute_stream(void* stream) override { device_->set_compute_stream(stream); }
  Status finish() override { return device_->drain(); }

  SpaceCounters counters() override;
  int64_t device_bytes() const override { return device_->allocated_bytes(); }
  int64_t pinned_bytes() const override { return device_->pinned_bytes(); }

 private:
  DeviceSpace(const EngineOptions& options, int64_t record_bytes, std::unique_ptr<Device> device,
              std::span<std::byte> staging);
  Status open();
  Status reserve_lanes(int64_t batch);
  Status reserve_tables(int64_t batch, int64_t groups);

  EngineOptions options_;
  int64_t record_bytes_;
  std::unique_ptr<Device> device_;  // before all that frees itself there
  std::span<std::byte> staging_;
  bool is_staging_pinned_ = false;

  // reserve()'s.
  int64_t batch_ = 0;
  int64_t groups_ = 0;
  PinnedBytes lane_memory_;
  PinnedBytes table_memory_;  // tables, the selector's answer
  LandingLanes lanes_;
  DeviceBytes landing_;  // [batch * pages_max, record_bytes]
  DeviceBytes scratch_;  // of attention
  std::unique_ptr<TableRing> tables_;
  DeviceBytes outbox_;  // [kWriteBuffers, write_buffer_bytes]
  DeviceSelector* selector_ = nullptr;

  std::optional<Device::On> chunk_;  // makes kWrite the current stream inside a chunk
  std::vector<Event> attended_;      // [layers]: the last attention over a layer's pages
  Event tokens_ = -1;                // a chunk's tokens exist
  Event packed_ = -1;                // a chunk's tokens are packed
  Event sealed_ = -1;                // a run stands in the outbox
  std::vector<Event> sent_;          // [kWriteBuffers]: a run stands in its buffer
  std::vector<Event> needs_;         // [layers]: compute came to need a layer's loads ...
  std::vector<Event> has_;           // [layers]: ... and had them
  std::vector<bool> is_wait_timed_;  // [layers]: both were recorded, and their time is not taken
  SpaceCounters counters_;
};

}  // namespace kvswap
