#pragma once

#include <c10/core/Device.h>

#include <string>

namespace kvswap {

/// Where the tensors of a session on `device` (find_device.h) are.
at::Device tensor_device(const std::string& device);

/// torch's current stream there, a cudaStream_t.
void* current_stream(at::Device device);

}  // namespace kvswap
