#include "device/upload_ring.h"

#include <cstring>
#include <utility>

namespace kvswap {

Result<std::unique_ptr<UploadRing>> UploadRing::create(Device& device, std::byte* host,
                                                       int64_t segment_bytes) {
  std::unique_ptr<UploadRing> ring(new UploadRing(device, host, segment_bytes));
  auto mirror = DeviceBytes::allocate(device, kSegments * segment_bytes);
  if (!mirror.is_ok()) return mirror.status();
  ring->mirror_ = std::move(mirror.value());
  for (auto& of_segment : ring->left_) {
    for (Event& event : of_segment) {
      auto made = device.make_event();
      if (!made.is_ok()) return made.status();
      event = made.value();
    }
  }
  return ring;
}

UploadRing::Tables UploadRing::open(int64_t bytes) {
  KVSWAP_ASSERT(bytes <= segment_bytes_);
  if (used_ + bytes > segment_bytes_) next_segment();
  const int64_t begin = segment_ * segment_bytes_ + used_;
  used_ += bytes;
  return {*this, begin, begin + bytes};
}

const std::byte* UploadRing::Tables::put(const void* table, int64_t bytes) {
  const int64_t place = next_;
  next_ += padded(bytes);
  KVSWAP_ASSERT(next_ <= end_);
  if (bytes > 0) std::memcpy(ring_.host_ + place, table, bytes);
  return ring_.mirror_.data() + place;
}

void UploadRing::Tables::send() {
  ring_.is_sent_[begin_ / ring_.segment_bytes_][static_cast<size_t>(ring_.device_.stream())] = true;
  ring_.device_.copy_in(ring_.mirror_.data() + begin_, ring_.host_ + begin_, next_ - begin_);
}

void UploadRing::next_segment() {
  const OfStreams& own = is_sent_[segment_];
  const OfStreams& before = is_sent_[(segment_ + kSegments - 1) % kSegments];
  for (int stream = 0; stream < kStreams; ++stream) {
    if (!own[stream] && !before[stream]) continue;
    const Device::On on(device_, static_cast<Stream>(stream));
    device_.record(left_[segment_][stream]);
  }
  segment_ = (segment_ + 1) % kSegments;
  used_ = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    if (!std::exchange(is_sent_[segment_][stream], false)) continue;
    // Left last time round, when the kernels of this segment's tables were queued.
    const Event left = left_[(segment_ + 1) % kSegments][stream];
    // An error is the device's, which keeps it and returns it from the next synchronize().
    (void)device_.synchronize(left).is_ok();
  }
}

}  // namespace kvswap
