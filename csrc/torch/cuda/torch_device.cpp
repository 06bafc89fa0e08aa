#include "torch/torch_device.h"

#include <c10/cuda/CUDAStream.h>

#include "device/cuda/cuda_device.h"

namespace kvswap {

DeviceKind cuda_device_kind(int index) { return cuda_device(index); }

void* current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace kvswap
