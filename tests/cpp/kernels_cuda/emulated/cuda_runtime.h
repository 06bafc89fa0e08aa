#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "cuda_runtime_api.h"

/// A stand-in for the toolkit's header: the kernels of csrc/kernels/cuda/ run on the host, one
/// block after the other, each thread of a block a fiber. Barriers and shuffles are where fibers
/// change.
///
/// What it finds: wrong indices, wrong arithmetic, reads outside a buffer (with GuardedBuffer), a
/// barrier that not all threads reach, and races, as a result that depends on the order of threads.
/// What it cannot: anything about speed, or about the memory model between barriers.
///
/// One block at a time on each host thread; its shared memory is static and keeps what the block
/// before left in it.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

enum class Order { kRising, kFalling, kShuffled };
/// In which order the threads of a block run between two barriers. All must give the same bits.
inline Order order = Order::kRising;

struct Place {
  dim3 thread, block, block_size, grid_size;
};
inline constinit thread_local Place here;

/// Queues a kernel on a stream, where a runtime does; null: it runs at once.
inline cudaError_t (*queue)(cudaStream_t stream, std::function<void()> kernel) = nullptr;
/// Judges what kernels load through the read-only path; null: any address will do.
inline void (*check_load)(const void* address) = nullptr;

/// Runs body for every thread of every block.
void run(dim3 grid, dim3 block, const std::function<void()>& body);
void wait_for_block();
/// What every lane of the warp put in: [32] values, valid until the warp's next call.
const uint64_t* exchange(uint64_t value);

}  // namespace emulated

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const dim3 grid = config->gridDim;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
      config->dynamicSmemBytes != 0) {
    return emulated::fail(cudaErrorInvalidConfiguration);
  }
  const auto kernel_run = [grid, block = config->blockDim, kernel,
                           given = std::tuple<Parameters...>(arguments...)] {
    emulated::run(grid, block, [&] { std::apply(kernel, given); });
  };
  if (emulated::queue != nullptr) return emulated::queue(config->stream, kernel_run);
  kernel_run();
  return cudaSuccess;
}

#define threadIdx (::emulated::here.thread)
#define blockIdx (::emulated::here.block)

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __syncwarp(unsigned = ~0u) { emulated::exchange(0); }

namespace emulated {
template <typename T>
T taken(const uint64_t* values, int lane) {
  T value;
  std::memcpy(&value, &values[lane & 31], sizeof(T));
  return value;
}
template <typename T>
const uint64_t* given(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return exchange(bits);
}
inline int lane() { return static_cast<int>(here.thread.x % 32); }
}  // namespace emulated

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::taken<T>(emulated::given(value), emulated::lane() ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::taken<T>(emulated::given(value), lane);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const uint64_t* values = emulated::given(value);
  const int from = emulated::lane() - delta;
  return from < 0 ? value : emulated::taken<T>(values, from);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t* values = emulated::given(predicate != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(values[lane]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <typename T>
T __ldg(const T* address) {
  if (emulated::check_load != nullptr) emulated::check_load(address);
  return *address;
}

inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address += value;
  return before;
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * pick) & 0xff) << (8 * i);
  }
  return result;
}
