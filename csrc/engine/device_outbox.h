#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/page_space.h"

namespace kvswap {

/// Runs are packed on the device and copied from there to the write buffers, on the write stream.
///
/// staging: the write buffers, pinned between open() and close(). Each has its like on the device.
class DeviceOutbox final : public Outbox {
 public:
  DeviceOutbox(Device& device, std::span<std::byte> staging, int64_t buffers)
      : device_(device), staging_(staging), sent_(buffers) {}
  Status open();
  void close();

  std::byte* at(const RecordStore::StagedRun& run) override;
  Sent send(const RecordStore::StagedRun& run, int64_t bytes) override;
  Status arrive(const RecordStore::StagedRun& run) override;

 private:
  Event sent_of(const RecordStore::StagedRun& run) const;

  Device& device_;
  std::span<std::byte> staging_;
  bool is_pinned_ = false;
  DeviceBytes memory_;       // as long as staging
  Event sealed_ = -1;        // a run is packed
  std::vector<Event> sent_;  // [buffers]: a run stands in its buffer
};

}  // namespace kvswap
