#include "torch/torch_device.h"

namespace kvswap {

at::Device tensor_device(const std::string& device) {
  const at::Device parsed(device == "host" ? "cpu" : device);
  return parsed.is_cuda() && !parsed.has_index() ? at::Device(at::kCUDA, 0) : parsed;
}

// torch/cuda/torch_device.cpp answers where this is built with CUDA.
#if !KVSWAP_HAS_CUDA

void* current_stream(at::Device) { return nullptr; }

#endif

}  // namespace kvswap
