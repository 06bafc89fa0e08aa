#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/upload_ring.h"
#include "engine/backend/device_compute.h"
#include "engine/backend/memory_backend.h"
#include "engine/backend/pinned_buffer.h"
#include "engine/backend/staging_buffers.h"

namespace kvswap {

/// Loads land in lanes of pinned memory; one copy and one scatter a layer bring them to their
/// pages, on the load stream.
///
/// Order between streams, each by an event:
///   compute -> load    a page is overwritten after the last attention of its layer
///   load -> compute    attention runs when the records have come
class DeviceLoadStaging final : public LoadStaging {
 public:
  DeviceLoadStaging(Device& device, const std::unique_ptr<UploadRing>& tables,
                    const DeviceCompute& compute, int64_t record_bytes, AtEnd pinned_at_end)
      : device_(device),
        tables_(tables),
        compute_(compute),
        record_bytes_(record_bytes),
        pinned_at_end_(pinned_at_end),
        buffers_(device) {}
  Status open();
  /// Lanes of `lane_records` each; nothing is in flight.
  Status reserve(int64_t lane_records);

  Result<std::shared_ptr<std::byte>> make_landing(int64_t bytes) override;
  bool can_acquire(int64_t loads) const override { return loads == 0 || buffers_.has_room(); }
  Status acquire(Fetch& fetch) override { return buffers_.acquire(fetch); }
  Status publish(Fetch& fetch) override;
  void give_back(Fetch& fetch) override { buffers_.release(fetch); }
  std::byte* landing_in(std::byte*) const override { return nullptr; }

  /// Its seconds by those of one load in seven, which stands for those up to the next: to time one
  /// is six calls of the runtime.
  SpaceCounters counters() const;

 private:
  Status begin_timing();

  Device& device_;
  const std::unique_ptr<UploadRing>& tables_;
  const DeviceCompute& compute_;
  int64_t record_bytes_;
  AtEnd pinned_at_end_;
  PinnedBuffer lane_memory_;
  StagingBuffers buffers_;
  DeviceBytes staging_;           // [lane_records, record_bytes]
  Event needs_ = -1;              // compute came to need what one load brings ...
  Event has_ = -1;                // ... and had it
  int64_t until_timed_ = 0;       // loads before the next that is timed
  int64_t timed_stands_for_ = 0;  // so many loads; 0: none was timed yet
  SpaceCounters counters_;
};

}  // namespace kvswap
