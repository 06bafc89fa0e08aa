#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/element.cuh"

namespace kvswap::cuda {

/// sums[16, 8] += a[16, 16] * b[16, 8], one warp, operands of 16 bits, sums in fp32.
///
/// Lane l, g = l / 4, c = l % 4, holds (two neighbouring elements in each register):
///   a: (g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8, 2c + 8)   [row, k]
///   b: (2c, g), (2c + 8, g)                                 [k, column]
///   sums: (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1)
template <typename T>
__device__ inline void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

}  // namespace kvswap::cuda
