#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace kvswap {

/// Small tables for kernels: written on the host, copied on the current stream, used there next.
///
/// A ring of segments, each twice: in host memory that the caller lends and the device has pinned,
/// and on the device. A segment is used again once the streams that its tables were sent on have
/// passed the point where the one after it was left, which is after every kernel that they were
/// made for, as long as those of one kernel fit in a segment. Other streams are not waited for:
/// writing to disk overlaps with an attention that takes long. Not thread-safe.
class UploadRing {
 public:
  static constexpr int kSegments = 4;
  static constexpr int64_t kAlignment = 256;
  /// Room of a table in a segment.
  static int64_t padded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  /// host: [kSegments, segment_bytes], pinned; outlives the ring.
  static Result<std::unique_ptr<UploadRing>> create(Device& device, std::byte* host,
                                                    int64_t segment_bytes);

  /// Tables of one kernel, or of a few: written one after the other, copied together.
  class Tables {
   public:
    /// Where the copy of `table` will be once send() has queued it.
    template <typename T>
    const T* add(const T* table, int64_t count) {
      return reinterpret_cast<const T*>(put(table, count * int64_t{sizeof(T)}));
    }
    template <typename T>
    const T* add(const std::vector<T>& table) {
      return add(table.data(), static_cast<int64_t>(table.size()));
    }
    /// On the current stream; the kernels follow there, and on no other.
    void send();

   private:
    friend class UploadRing;
    Tables(UploadRing& ring, int64_t begin, int64_t end)
        : ring_(ring), begin_(begin), next_(begin), end_(end) {}
    const std::byte* put(const void* table, int64_t bytes);

    UploadRing& ring_;
    int64_t begin_;
    int64_t next_;
    int64_t end_;
  };
  /// Room for tables of padded() bytes in all.
  Tables open(int64_t bytes);

 private:
  UploadRing(Device& device, std::byte* host, int64_t segment_bytes)
      : device_(device), host_(host), segment_bytes_(segment_bytes) {}
  void next_segment();
  using OfStreams = std::array<bool, kStreams>;

  Device& device_;
  std::byte* host_;
  int64_t segment_bytes_;
  DeviceBytes mirror_;
  std::array<std::array<Event, kStreams>, kSegments> left_{};
  std::array<OfStreams, kSegments> is_sent_{};  // since the segment was entered
  int segment_ = 0;
  int64_t used_ = 0;
};

}  // namespace kvswap
