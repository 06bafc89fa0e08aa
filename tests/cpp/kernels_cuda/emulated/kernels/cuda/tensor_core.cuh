#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace kvswap::cuda {

/// Stands in for the file of the same name in csrc/, from PTX's description of mma.m16n8k16: the
/// operands are gathered from all lanes, and each lane computes its four sums.
template <typename T>
void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1) {
  float a[16][16];
  float b[16][8];
  const uint32_t given[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; ++i) {
    const uint64_t* words = emulated::given(given[i]);
    for (int lane = 0; lane < 32; ++lane) {
      float pair[2];
      unpack_pair<T>(static_cast<uint32_t>(words[lane]), pair[0], pair[1]);
      for (int e = 0; e < 2; ++e) {
        const int across = lane % 4 * 2 + e;
        if (i < 4) {
          a[lane / 4 + i % 2 * 8][across + i / 2 * 8] = pair[e];
        } else {
          b[across + (i - 4) * 8][lane / 4] = pair[e];
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int row = emulated::lane() / 4 + i / 2 * 8;
    const int column = emulated::lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) sums[i] += a[row][k] * b[k][column];
  }
}

}  // namespace kvswap::cuda
