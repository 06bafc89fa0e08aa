#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace kvswap::cuda {

inline constexpr int kItems = 16;               // scores of one thread
inline constexpr int kSmallTopKThreads = 256;   // 4096 scores a block
inline constexpr int kLargeTopKThreads = 1024;  // 16384 scores a block
inline constexpr int64_t kSmallChunk = int64_t{kItems} * kSmallTopKThreads;
inline constexpr int64_t kLargeChunk = int64_t{kItems} * kLargeTopKThreads;

/// A score as an unsigned number of the same order: -0 and 0 are a tie; -inf and NaN, which are
/// never chosen, are 0, and all else is more.
__host__ __device__ inline uint32_t ordered_score(uint32_t bits) {
  if (bits == 0x80000000u) bits = 0;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  if (is_nan || bits == 0xff800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Digits from the highest down: 11, 11 and 10 bits.
inline constexpr int kDigits = 3;
inline constexpr int kBins = 2048;
__host__ __device__ constexpr int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__host__ __device__ constexpr uint32_t digit_mask(int digit) { return digit == 2 ? 1023u : 2047u; }

/// TopK in levels: a level cuts its input into chunks of one block each, and what the blocks choose
/// is, in the same order, the next level's input. The last has one chunk. An exact choice of the k
/// best: what is among the k best of a row is among the k best of its chunk.
///
/// What one large block holds is one level: a second launch costs more than the block takes. Of
/// more scores chunks are small, so that a row is many blocks' work, where all that they hand on is
/// one block's input again; else large. (Measured on an H100: 16 rows of 131,072 scores, k = 400,
/// took 34 us in two levels of large chunks and 46 us in three of small ones.)
struct TopKLevels {
  explicit TopKLevels(int64_t k) : k(k) {}

  int64_t chunk_scores(int64_t count) const {
    if (count <= kSmallChunk) return kSmallChunk;
    if (count <= kLargeChunk) return kLargeChunk;
    return ceil_div(count, kSmallChunk) * k <= kLargeChunk ? kSmallChunk : kLargeChunk;
  }
  /// What one chunk hands on at most.
  int64_t list_capacity(int64_t count) const {
    const int64_t chunk = chunk_scores(count);
    return k < chunk ? k : chunk;
  }
  int64_t chunks(int64_t count) const {
    return count == 0 ? 1 : ceil_div(count, chunk_scores(count));
  }
  /// Of the next level.
  int64_t next_count(int64_t count) const { return chunks(count) * list_capacity(count); }

  int64_t k;
};

/// One chunk's choice, between levels. Keys and ids stand beside each other in two arrays.
struct TopKLists {
  uint32_t* keys = nullptr;   // [rows, lists, capacity]
  int32_t* ids = nullptr;     // [rows, lists, capacity]
  int32_t* counts = nullptr;  // [rows, lists]
  int64_t lists = 0;
  int64_t capacity = 0;
};

}  // namespace kvswap::cuda
