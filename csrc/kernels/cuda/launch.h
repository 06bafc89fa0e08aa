#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "io/status.h"
#include "kernels/types.h"

namespace kvswap::cuda {

inline constexpr int64_t kGridXMax = 2147483647;
inline constexpr int64_t kGridYMax = 65535;  // also of z

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
};

__host__ __device__ constexpr int64_t ceil_div(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit;
}
__host__ __device__ constexpr int64_t round_up(int64_t value, int64_t unit) {
  return ceil_div(value, unit) * unit;
}

/// Enqueues kernel(arguments...); a grid of size 0 is nothing to do.
template <typename... Parameters, typename... Arguments>
Status launch(const char* where, void* stream, const Grid& grid, int threads,
              void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Status::ok();
  if (grid.x > kGridXMax || grid.y > kGridYMax || grid.z > kGridYMax) {
    return Status::invalid(std::string(where) + ": a launch must fit a grid of (2147483647, 65535" +
                           ", 65535) blocks, got (" + std::to_string(grid.x) + ", " +
                           std::to_string(grid.y) + ", " + std::to_string(grid.z) +
                           "); split the batch");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>(grid.x);
  config.gridDim.y = static_cast<unsigned>(grid.y);
  config.gridDim.z = static_cast<unsigned>(grid.z);
  config.blockDim.x = static_cast<unsigned>(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error == cudaSuccess) return Status::ok();
  (void)cudaGetLastError();  // said here, so not once more by the next call
  return Status::storage(
      std::string(where) + ": the device must take the launch, got: " + cudaGetErrorString(error),
      0);
}

/// "where: name must be low..high, got value", or ok.
inline Status check_range(const char* where, const char* name, int64_t value, int64_t low,
                          int64_t high) {
  if (low <= value && value <= high) return Status::ok();
  return Status::invalid(std::string(where) + ": " + name + " must be " + std::to_string(low) +
                         ".." + std::to_string(high) + ", got " + std::to_string(value));
}

inline Status check_floating(const char* where, DType dtype) {
  if (!has_row_scales(dtype)) return Status::ok();
  return Status::invalid(std::string(where) +
                         ": dtype must be fp32, bf16 or fp16, got int8 or int4");
}

}  // namespace kvswap::cuda
