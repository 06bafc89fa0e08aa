#include "device/device.h"

namespace kvswap {

Status make_events(Device& device, std::span<Event* const> events) {
  for (Event* event : events) {
    auto made = device.make_event();
    if (!made.is_ok()) return made.status();
    *event = made.value();
  }
  return Status::ok();
}

Result<DeviceBytes> DeviceBytes::allocate(Device& device, int64_t bytes) {
  DeviceBytes memory;
  if (bytes == 0) return memory;
  auto data = device.allocate(bytes);
  if (!data.is_ok()) return data.status();
  memory.device_ = &device;
  memory.data_ = data.value();
  memory.size_ = bytes;
  return memory;
}

DeviceBytes& DeviceBytes::operator=(DeviceBytes&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) device_->free(data_, size_);
}

}  // namespace kvswap
