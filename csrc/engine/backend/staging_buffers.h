#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "device/device.h"
#include "engine/backend/fetcher.h"

namespace kvswap {

/// Pinned host memory where reads for a device land, in lanes: one for each layer's loads in
/// flight. A lane is lent to a fetch, copied from, and free again once that copy is done.
///
/// Where GPUDirect Storage is at hand, a reader that targets device memory would lend the staging
/// buffer's own addresses here, and publish() would only scatter. Not thread-safe.
class StagingBuffers {
 public:
  static constexpr int kLanes = 2;  // the layer that is about to attend, and the one ahead of it

  explicit StagingBuffers(Device& device) : device_(device) {}
  Status open();

  /// host: [kLanes, lane_records, record_bytes], pinned; no lane is lent.
  void reserve(std::byte* host, int64_t lane_records, int64_t record_bytes);

  bool has_room() const;
  /// Each load's target; the host waits while an earlier copy from the lane is under way.
  Status acquire(Fetch& fetch);
  /// On the load stream: one copy of what landed to `staging`, one scatter to the pages. `pages`:
  /// [loads] addresses on the device, in the loads' order, on that stream. is_timed: it counts for
  /// copy_seconds().
  void copy(Fetch& fetch, std::byte* staging, std::byte* const* pages, bool is_timed);
  /// Reached when the fetch's pages hold their records.
  Event copied(const Fetch& fetch) const { return lanes_[fetch.lane].copied; }
  /// The lane may be lent again.
  void release(Fetch& fetch);
  /// Seconds of copies, of those whose lane was lent again: one that was timed stands for as many
  /// records as were copied since the one before.
  double copy_seconds() const { return copy_seconds_; }

 private:
  struct Lane {
    bool is_lent = false;
    double stands_for = 0;  // a timed copy that was queued, for so many of its like; 0: none
    Event begins = -1;
    Event copied = -1;
  };
  std::byte* memory(int lane) const { return host_ + lane * lane_records_ * record_bytes_; }

  Device& device_;
  std::array<Lane, kLanes> lanes_;
  std::byte* host_ = nullptr;
  int64_t lane_records_ = 0;
  int64_t record_bytes_ = 0;
  int64_t untimed_records_ = 0;  // copied since the last copy that was timed
  double copy_seconds_ = 0;
};

}  // namespace kvswap
