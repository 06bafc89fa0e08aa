#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "device/device.h"

namespace kvswap {

struct HostDeviceOptions {
  int64_t delay_us_max = 0;  // streams sleep up to so long before some operations
  uint64_t seed = 1;         // of the sleeps
  // This one is `slow_us` late with every operation: the others run ahead of it as far as events
  // let them.
  std::optional<Stream> slow = std::nullopt;
  int64_t slow_us = 0;
  // Of its own and of pinned memory together; null: no limit but the host's.
  const std::atomic<int64_t>* bytes_max = nullptr;
};

/// A device made of host memory, the CPU's kernels and a thread a stream: what the device path is
/// tested on where there is none. Operations run later and in the order of their stream alone, so
/// that a missing event shows as wrong numbers, or under ThreadSanitizer.
DeviceKind host_device(const HostDeviceOptions& options);

}  // namespace kvswap
