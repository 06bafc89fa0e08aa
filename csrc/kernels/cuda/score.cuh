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

/// A block [rank, 16] of a summary: it stands in a chunk.
template <typename T>
struct BlockSource {
  const T* chunk = nullptr;
  const float* chunk_scales = nullptr;  // null unless int8
  int in_chunk = 0;
};

inline constexpr int kVectorsHeld =
    8;  // loads of a lane, 16 bytes each, that are under way at once

/// What a lane holds of a block: columns `begin` + column + s * kColumns of the summary.
template <typename T, int kSteps>
struct HeldRows {
  using Lanes = BlockLanes<T>;

  __device__ void load(const BlockSource<T>& source, bool is_read, int begin, int rank, int lane) {
    const int column = begin + lane / Lanes::kPieces;
    const T* rows = source.chunk + static_cast<int64_t>(source.in_chunk) * rank * kBlockRows +
                    lane % Lanes::kPieces * kVector<T>;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      vectors[s] = make_uint4(0, 0, 0, 0);
      const int r = column + s * Lanes::kColumns;
      if (is_read && r < rank) vectors[s] = load_read_only<uint4>(rows + r * kBlockRows);
    }
  }

  template <int kQueries>
  __device__ void add_products(const float* query, int begin, int rank, int lane,
                               float (&sums)[kQueries][kVector<T>]) const {
    const int column = begin + lane / Lanes::kPieces;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int r = column + s * Lanes::kColumns;
      if (r >= rank) break;
      float keys[kVector<T>];
      unpack<T>(vectors[s], keys);
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        const float factor = query[q * rank + r];
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sums[q][i] = fmaf(factor, keys[i], sums[q][i]);
      }
    }
  }

  uint4 vectors[kSteps];
};

/// Queries that blocks are scored by: staged[q * rank + r].
struct StagedQueries {
  const float* values;
  int rank;
};

/// One warp: score_blocks() below, kBlocks blocks at a time.
template <typename T, int kQueries, int kBlocks, typename Tile>
__device__ inline void score_some_blocks(int first, int last, int step, StagedQueries query,
                                         const Tile& tile) {
  using Lanes = BlockLanes<T>;
  constexpr int kSteps = kVectorsHeld / kBlocks;
  constexpr int kPass = kSteps * Lanes::kColumns;  // of the rank; more than one where kBlocks is 1
  constexpr int kAtOnce = kQueries * kVector<T> <= 32 ? kQueries : 32 / kVector<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = Lanes::token_of(lane % kBlockRows);
  const int rank = query.rank;
#pragma unroll 1
  for (; first < last; first += kBlocks * step) {
    bool counts[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      counts[b] = first + b * step < last && tile.counts(first + b * step, token);
    }
    bool is_read[kBlocks];
    BlockSource<T> sources[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      is_read[b] = __any_sync(kWholeWarp, counts[b]);
      if (is_read[b]) sources[b] = tile.find(first + b * step);
    }
    HeldRows<T, kSteps> held[kBlocks];
    float scales[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      held[b].load(sources[b], is_read[b], 0, rank, lane);
      scales[b] = 1.0f;
      if (sources[b].chunk_scales != nullptr) {
        scales[b] = sources[b].chunk_scales[sources[b].in_chunk * kBlockRows + token];
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (first + b * step >= last) break;
      float scores[kQueries];
#pragma unroll
      for (int q = 0; q < kQueries; q += kAtOnce) {
        const float* values = query.values + q * rank;
        float sums[kAtOnce][kVector<T>] = {};
        held[b].add_products(values, 0, rank, lane, sums);
        if constexpr (kBlocks == 1) {
#pragma unroll 1
          for (int r = kPass; r < rank; r += kPass) {
            held[b].load(sources[b], is_read[b], r, rank, lane);
            held[b].add_products(values, r, rank, lane, sums);
          }
          // The next queries begin anew.
          if (q + kAtOnce < kQueries && rank > kPass) {
            held[b].load(sources[b], is_read[b], 0, rank, lane);
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          scores[q + i] = reduce_scatter<kVector<T>, Lanes::kPieces>(sums[i], lane) * scales[b];
        }
      }
      if (lane < kBlockRows) tile.write(first + b * step, token, counts[b], scores);
    }
  }
}

/// One warp: the products of blocks first, first + step, .. below `last` with kQueries queries.
///
/// A tile says which tokens count(block, token), where to find(block) those in which one does, and
/// has write(block, token, counts, scores) called for every token. A lane asks for what it needs of
/// several blocks before it uses the first: the rows of one block alone, at a low rank, would leave
/// the memory idle.
template <typename T, int kQueries, typename Tile>
__device__ inline void score_blocks(int first, int last, int step, StagedQueries query,
                                    const Tile& tile) {
  constexpr int kColumns = BlockLanes<T>::kColumns;
  if (query.rank <= kVectorsHeld / 4 * kColumns) {
    score_some_blocks<T, kQueries, 4>(first, last, step, query, tile);
  } else if (query.rank <= kVectorsHeld / 2 * kColumns) {
    score_some_blocks<T, kQueries, 2>(first, last, step, query, tile);
  } else {
    score_some_blocks<T, kQueries, 1>(first, last, step, query, tile);
  }
}

}  // namespace kvswap::cuda
