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
/// Chunks are small, so that a row is many blocks' work, while four of them still hand on no more
/// than one holds.
struct TopKLevels {
  static constexpr int64_t kSmallKMax = kSmallChunk / 4;

  explicit TopKLevels(int64_t k) : k(k) {}

  int64_t chunk_scores(int64_t count) const {
    return count <= kSmallChunk || k <= kSmallKMax ? kSmallChunk : kLargeChunk;
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
