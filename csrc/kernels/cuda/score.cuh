#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/read_only.cuh"
#include "kernels/low_rank_score.h"

namespace kvswap::cuda {

inline constexpr int kBlockRows = static_cast<int>(kSummaryBlock);  // tokens of a summary block

/// Adds values over the lanes that differ in kBit and the bits above it, while halving what a lane
/// keeps: after log2(kSize) steps each lane is left with one sum. A lane whose bit is set keeps the
/// upper half. The bits above those are added plainly.
template <int kSize, int kBit>
__device__ inline float reduce_scatter(const float (&values)[kSize], int lane) {
  if constexpr (kSize == 1) {
    float sum = values[0];
#pragma unroll
    for (int bit = kBit; bit < 32; bit *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, bit);
    return sum;
  } else {
    const bool is_upper = (lane & kBit) != 0;
    float kept[kSize / 2];
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float given = is_upper ? values[i] : values[i + kSize / 2];
      const float own = is_upper ? values[i + kSize / 2] : values[i];
      kept[i] = own + __shfl_xor_sync(kWholeWarp, given, kBit);
    }
    return reduce_scatter<kSize / 2, kBit * 2>(kept, lane);
  }
}

/// How the lanes of a warp stand over a block [rank, 16]: `pieces` lanes side by side hold the 16
/// tokens of one column of the summary, and the warp holds 32 / pieces columns at once.
template <typename T>
struct BlockLanes {
  static constexpr int kPieces = kBlockRows / kVector<T>;
  static constexpr int kColumns = 32 / kPieces;

  /// The token whose sum a lane below 16 has after reduce_scatter().
  __host__ __device__ static int token_of(int lane) {
    int token = lane % kPieces * kVector<T>;
    int half = kVector<T> / 2;
    for (int bit = kPieces; half > 0; bit *= 2, half /= 2) {
      if (lane & bit) token += half;
    }
    return token;
  }
};

/// One warp: the products of one block with kQueries queries, which stand `stride` apart. Lane l <
/// 16 gets those of token BlockLanes<T>::token_of(l), as does lane l + 16.
template <typename T, int kQueries>
__device__ inline void score_block(const T* block, const float* query, int stride, int rank,
                                   int lane, float (&scores)[kQueries]) {
  using Lanes = BlockLanes<T>;
  float sums[kQueries][kVector<T>] = {};
  const T* source = block + lane % Lanes::kPieces * kVector<T>;
#pragma unroll 4
  for (int r = lane / Lanes::kPieces; r < rank; r += Lanes::kColumns) {
    float keys[kVector<T>];
    unpack<T>(load_read_only<uint4>(source + r * kBlockRows), keys);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      const float factor = query[q * stride + r];
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) sums[q][i] = fmaf(factor, keys[i], sums[q][i]);
    }
  }
#pragma unroll
  for (int q = 0; q < kQueries; ++q) {
    scores[q] = reduce_scatter<kVector<T>, Lanes::kPieces>(sums[q], lane);
  }
}

}  // namespace kvswap::cuda
