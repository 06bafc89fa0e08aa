#include <atomic>
#include <utility>

#include "cuda_runtime_api.h"

namespace {

struct Named {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr Named kNamed[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
};
constexpr Named kUnknown = {cudaSuccess, "unknown", "unknown error"};

const Named& named(cudaError_t error) {
  for (const Named& each : kNamed) {
    if (each.error == error) return each;
  }
  return kUnknown;
}

thread_local cudaError_t last = cudaSuccess;
std::atomic<cudaError_t> sticky = cudaSuccess;

}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return named(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return named(error).text; }
cudaError_t cudaGetLastError() {
  const cudaError_t error = std::exchange(last, cudaSuccess);
  return emulated::broken() != cudaSuccess ? emulated::broken() : error;
}

namespace emulated {

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}
void break_device(cudaError_t error) { sticky = error; }
cudaError_t broken() { return sticky.load(std::memory_order_relaxed); }

}  // namespace emulated
