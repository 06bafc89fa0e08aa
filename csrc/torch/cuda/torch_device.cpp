#include "torch/torch_device.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "device/cuda/cuda_device.h"
#include "device/find_device.h"

namespace kvswap {
namespace {

Result<std::optional<DeviceKind>> find_cuda_device(const std::string& name) {
  try {
    // After a long prompt torch may keep most of the memory for tensors to come.
    const auto make_room = [] { c10::cuda::CUDACachingAllocator::emptyCache(); };
    return std::optional<DeviceKind>(cuda_device(tensor_device(name).index(), make_room));
  } catch (const c10::Error& error) {
    return Status::invalid("session: device must be a CUDA device, got '" + name + "'");
  }
}

[[maybe_unused]] const bool is_registered = (set_find_cuda(find_cuda_device), true);

}  // namespace

void* current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace kvswap
