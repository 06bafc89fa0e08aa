#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/device.h"
#include "device/upload_ring.h"
#include "engine/backend/device_compute.h"
#include "engine/backend/load_staging.h"
#include "engine/backend/memory_backend.h"
#include "engine/backend/pinned_buffer.h"
#include "engine/backend/store_staging.h"
#include "engine/plan.h"
#include "memory/arena.h"

namespace kvswap {

/// Sizes of what stands beside the pages of a session on a device.
struct DeviceRoom {
  int64_t lane_records = 0;  // of one landing lane, and of the staging on the device
  int64_t outbox_bytes = 0;
  int64_t scratch_bytes = 0;  // of attention
  int64_t mass_bytes = 0;     // its attention, see Compute::weigh()
  int64_t segment_bytes = 0;  // of the table ring
  SelectionRoom choice;
};
DeviceRoom device_room(const Plan& plan, int64_t batch, int64_t groups);

/// Pages are device memory. Four streams work beside each other, as Stream tells; the host waits
/// for chosen ids, for disks, and for copies out of buffers it needs again, never for a whole
/// device. DeviceCompute, DeviceLoadStaging and DeviceStoreStaging say which stream waits for
/// which.
class DeviceBackend final : public MemoryBackend {
 public:
  /// staging: the write buffers; pinned as long as the space lives, which the caller's store
  /// outlives.
  static Result<std::unique_ptr<DeviceBackend>> create(const Plan& plan,
                                                       std::span<std::byte> staging);
  /// What stands beside the pages, on the device and in host memory that copies go through, for a
  /// batch and `groups` sealed groups of a sequence: a multiple of Plan::groups_unit. Write buffers
  /// are the caller's.
  static void reserve(Arena& arena, const Plan& plan, int64_t batch, int64_t groups);
  ~DeviceBackend() override;

  Device& device() { return *device_; }
  std::string name() const override { return device_->name(); }
  LoadStaging& landing() override { return landing_; }
  StoreStaging& outbox() override { return outbox_; }
  Compute& compute() override { return compute_; }
  Result<PagePool> make_pool(int64_t pages, int64_t page_bytes) override;
  Status reserve(int64_t batch, int64_t groups) override;
  SelectionPlace selection_place() const override { return selection_place_; }
  Status finish() override { return device_->drain(); }

  SpaceCounters counters() const override { return landing_.counters(); }
  int64_t device_bytes() const override { return device_->allocated_bytes(); }
  int64_t pinned_bytes() const override { return device_->pinned_bytes(); }

 private:
  DeviceBackend(const Plan& plan, std::unique_ptr<Device> device, std::span<std::byte> staging);
  Status open();
  Status reserve_tables(const DeviceRoom& room);

  const Plan& plan_;
  std::unique_ptr<Device> device_;  // before all that frees itself there
  PinnedBuffer table_memory_;       // tables, the selector's answer
  std::unique_ptr<UploadRing> tables_;
  DeviceCompute compute_;
  DeviceLoadStaging landing_;
  DeviceStoreStaging outbox_;
  SelectionPlace selection_place_;
  int64_t batch_ = 0;          // reserve()'s last
  int64_t groups_ = 0;         // the same
  int64_t landing_batch_ = 0;  // what there are lanes for; reads land there while tables grow
};

}  // namespace kvswap
