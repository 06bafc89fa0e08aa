#include "torch/torch_device.h"

#if KVSWAP_HAS_CUDA
#include <c10/cuda/CUDAStream.h>

#include "device/cuda/cuda_device.h"
#endif

namespace kvswap {

at::Device tensor_device(const std::string& device) {
  const at::Device parsed(device == "host" ? "cpu" : device);
  return parsed.is_cuda() && !parsed.has_index() ? at::Device(at::kCUDA, 0) : parsed;
}

#if KVSWAP_HAS_CUDA

DeviceKind cuda_device_kind(int index) { return cuda_device(index); }

void* current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

#else

DeviceKind cuda_device_kind(int) {
  TORCH_CHECK_VALUE(false,
                    "session: device must be cpu, since this build has no CUDA; build kvswap_torch "
                    "where nvcc and a torch with CUDA are, or move the model to the CPU");
}

void* current_stream(at::Device) { return nullptr; }

#endif

}  // namespace kvswap
