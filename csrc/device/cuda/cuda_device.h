#pragma once

#include <functional>

#include "device/device.h"

namespace kvswap {

/// A CUDA device by its number. Streams of its own beside the caller's; memory from a pool of its
/// own, so that a chunk more of a summary stops nobody. Needs compute capability 8.0 or more.
/// make_room: frees what the process keeps of the device's memory and does not use; called where an
/// allocation finds none.
DeviceKind cuda_device(int index, std::function<void()> make_room = {});

}  // namespace kvswap
