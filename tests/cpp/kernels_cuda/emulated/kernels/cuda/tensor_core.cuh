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
  const uint64_t given[3] = {uint64_t{a1} << 32 | a0, uint64_t{a3} << 32 | a2,
                             uint64_t{b1} << 32 | b0};
  const uint64_t* words = nullptr;  // of two registers, until the next exchange
  for (int i = 0; i < 6; ++i) {
    if (i % 2 == 0) words = emulated::exchange(given[i / 2]);
    for (int lane = 0; lane < 32; ++lane) {
      float pair[2];
      unpack_pair<T>(static_cast<uint32_t>(words[lane] >> i % 2 * 32), pair[0], pair[1]);
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
