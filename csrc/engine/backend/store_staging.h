#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/backend/memory_backend.h"
#include "engine/backend/pinned_buffer.h"

namespace kvswap {

/// Runs are packed on the device and copied from there to the write buffers, on the write stream;
/// their notes with them.
///
/// staging: the write buffers, pinned between open() and close(). Each has its like on the device,
/// with room for `note_bytes` beside it.
class DeviceStoreStaging final : public StoreStaging {
 public:
  DeviceStoreStaging(Device& device, std::span<std::byte> staging, int64_t buffers,
                     int64_t note_bytes)
      : device_(device), staging_(staging), note_bytes_(note_bytes), sent_(buffers) {}
  Status open();
  void close();

  std::byte* at(const RecordStore::StagedRun& run) override;
  int8_t* notes_at(RecordStore::StagedRun& run) override;
  Sent send(const RecordStore::StagedRun& run, int64_t bytes) override;
  Status arrive(RecordStore::StagedRun& run) override;

 private:
  Event sent_of(const RecordStore::StagedRun& run) const;
  int64_t first_note(const RecordStore::StagedRun& run) const;

  Device& device_;
  std::span<std::byte> staging_;
  int64_t note_bytes_;  // of a buffer
  bool is_pinned_ = false;
  DeviceBytes memory_;       // as long as staging
  DeviceBytes notes_;        // [buffers, note_bytes]
  PinnedBuffer host_notes_;  // the same
  Event sealed_ = -1;        // a run is packed
  std::vector<Event> sent_;  // [buffers]: a run stands in its buffer
};

}  // namespace kvswap
