#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace kvswap::cuda {

inline constexpr int kMoveThreads = 256;
inline constexpr int kMoveUnroll = 4;  // moves in flight before the first is stored

/// One warp's copy of `count` vectors, from one run of memory to another.
template <typename Vector>
__device__ inline void copy_run(Vector* target, const Vector* source, int count, int lane) {
  int i = lane;
  for (; i + (kMoveUnroll - 1) * 32 < count; i += kMoveUnroll * 32) {
    Vector held[kMoveUnroll];
#pragma unroll
    for (int u = 0; u < kMoveUnroll; ++u) held[u] = source[i + u * 32];
#pragma unroll
    for (int u = 0; u < kMoveUnroll; ++u) target[i + u * 32] = held[u];
  }
  for (; i < count; i += 32) target[i] = source[i];
}

/// The unit of work of this thread's warp.
__device__ inline uint32_t warp_unit() {
  return blockIdx.x * (kMoveThreads / 32) + threadIdx.x / 32;
}

/// Units are counted in 32 bits: a division by less is what takes time in a move.
inline Status check_units(const char* where, int64_t units) {
  return check_range(where, "warps' pieces of work", units, 0, 2147483647);
}

/// The widest of 16, 2 and 1 bytes that divides all of `bits`, which is an or of sizes, offsets and
/// addresses.
inline int move_bytes(uint64_t bits) { return bits % 16 == 0 ? 16 : bits % 2 == 0 ? 2 : 1; }

}  // namespace kvswap::cuda
