#pragma once

#include "device/device.h"

namespace kvswap {

/// A CUDA device by its number. Streams of its own beside the caller's; memory from a pool of its
/// own, so that a chunk more of a summary stops nobody. Needs compute capability 8.0 or more.
DeviceKind cuda_device(int index);

}  // namespace kvswap
