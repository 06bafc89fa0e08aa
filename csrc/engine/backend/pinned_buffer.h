#pragma once

#include <utility>

#include "device/device.h"
#include "memory/page_pool.h"

namespace kvswap {

/// Host memory that a device has pinned; given back on destruction, when nothing queued uses it.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  static Result<PinnedBuffer> allocate(Device& device, int64_t bytes, AtEnd at_end = AtEnd::kLeft) {
    PinnedBuffer pinned;
    if (bytes == 0) return pinned;
    auto memory = AlignedBytes::allocate(bytes, at_end);
    if (!memory.is_ok()) return memory.status();
    KVSWAP_RETURN_IF_ERROR(device.pin(memory.value().data(), bytes));
    pinned.memory_ = std::move(memory.value());
    pinned.device_ = &device;
    return pinned;
  }
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~PinnedBuffer() {
    if (device_ != nullptr) device_->unpin(memory_.data(), memory_.size());
  }
  std::byte* data() const { return memory_.data(); }

 private:
  Device* device_ = nullptr;
  AlignedBytes memory_;
};

}  // namespace kvswap
