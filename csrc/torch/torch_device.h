#pragma once

#include <ATen/ATen.h>

#include <string>

#include "device/device.h"

namespace kvswap {

/// Where tensors of a session on `device` (SessionOptions) are.
at::Device tensor_device(const std::string& device);

/// A CUDA device for the engine; throws where this build has none.
DeviceKind cuda_device_kind(int index);

/// torch's current stream there, a cudaStream_t.
void* current_stream(at::Device device);

}  // namespace kvswap
