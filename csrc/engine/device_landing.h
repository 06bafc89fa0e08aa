#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/table_ring.h"
#include "engine/device_compute.h"
#include "engine/landing_lanes.h"
#include "engine/page_space.h"
#include "engine/pinned_bytes.h"

namespace kvswap {

/// Loads land in lanes of pinned memory; one copy and one scatter a layer bring them to their
/// pages, on the load stream.
///
/// Order between streams, each by an event:
///   compute -> load    a page is overwritten after the last attention of its layer
///   load -> compute    attention runs when the records have come
class DeviceLanding final : public Landing {
 public:
  DeviceLanding(Device& device, const std::unique_ptr<TableRing>& tables,
                const DeviceCompute& compute, int64_t layers, int64_t record_bytes,
                AtEnd pinned_at_end)
      : device_(device),
        tables_(tables),
        compute_(compute),
        record_bytes_(record_bytes),
        pinned_at_end_(pinned_at_end),
        lanes_(device),
        needs_(layers),
        has_(layers),
        is_wait_timed_(layers, false) {}
  Status open();
  /// Lanes of `lane_records` each; nothing is in flight.
  Status reserve(int64_t lane_records);

  Result<std::shared_ptr<std::byte>> make_landing(int64_t bytes) override;
  bool can_lend(int64_t loads) const override { return loads == 0 || lanes_.has_room(); }
  Status lend(Fetch& fetch) override { return lanes_.lend(fetch); }
  Status publish(Fetch& fetch) override;
  void give_back(Fetch& fetch) override { lanes_.release(fetch); }
  std::byte* landing_in(std::byte*) const override { return nullptr; }

  SpaceCounters counters() const;

 private:
  Device& device_;
  const std::unique_ptr<TableRing>& tables_;
  const DeviceCompute& compute_;
  int64_t record_bytes_;
  AtEnd pinned_at_end_;
  PinnedBytes lane_memory_;
  LandingLanes lanes_;
  DeviceBytes staging_;              // [lane_records, record_bytes]
  std::vector<Event> needs_;         // [layers]: compute came to need a layer's loads ...
  std::vector<Event> has_;           // [layers]: ... and had them
  std::vector<bool> is_wait_timed_;  // [layers]: both were recorded, and their time is not taken
  SpaceCounters counters_;
};

}  // namespace kvswap
