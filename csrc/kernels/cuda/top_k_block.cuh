#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/top_k_levels.cuh"

namespace kvswap::cuda {

/// Which keys of a chunk are chosen: those above the threshold, and the first `ties` equal to it.
struct Threshold {
  uint32_t key;
  int ties;
};

template <int kThreads>
struct TopKShared {
  int bins[kBins];
  int warp_sums[kThreads / 32];
  int total;
  int bin;        // where the k-th best lies
  int above;      // keys in the bins above it
  int bin_count;  // keys in it
};

/// Sums of the threads before this one; shared.total is the sum of all. Both counts of a packed
/// value (16 bits each) stay below 2^16. Begins and ends with a barrier.
template <int kThreads>
__device__ inline int scan_block(int value, TopKShared<kThreads>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kWholeWarp, inclusive, step);
    if (lane >= step) inclusive += before;
  }
  __syncthreads();
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    constexpr int kWarps = kThreads / 32;
    const int own = lane < kWarps ? shared.warp_sums[lane] : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kWholeWarp, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane < kWarps) shared.warp_sums[lane] = sum - own;
    if (lane == 31) shared.total = sum;
  }
  __syncthreads();
  return shared.warp_sums[warp] + inclusive - value;
}

/// Finds the bin that holds the `wanted`-th best of the counted keys (1 <= wanted <= their number).
template <int kThreads>
__device__ inline void find_bin(int wanted, TopKShared<kThreads>& shared) {
  constexpr int kOwn = kBins / kThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;  // bins from the top down
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += shared.bins[top - i];
  int above = scan_block(sum, shared);
  if (above < wanted && wanted <= above + sum) {
    int bin = top;
    while (above + shared.bins[bin] < wanted) above += shared.bins[bin--];
    shared.bin = bin;
    shared.above = above;
    shared.bin_count = shared.bins[bin];
  }
  __syncthreads();
}

/// The threshold of the k best of a block's keys, digit by digit. Keys of 0 do not exist.
template <int kThreads>
__device__ inline Threshold find_threshold(const uint32_t (&keys)[kItems], int k,
                                           TopKShared<kThreads>& shared) {
  if (k == 0) return {0xffffffffu, 0};
  int existing = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) existing += keys[i] != 0;
  scan_block(existing, shared);
  if (shared.total <= k) return {0, 0};
  uint32_t prefix = 0;
  uint32_t decided = 0;  // bits of the prefix that are known
  int wanted = k;
  for (int digit = 0; digit < kDigits; ++digit) {
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
      shared.bins[bin] = 0;
    }
    __syncthreads();
    const int shift = digit_shift(digit);
    const uint32_t mask = digit_mask(digit);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (keys[i] != 0 && (keys[i] & decided) == prefix) {
        atomicAdd(&shared.bins[keys[i] >> shift & mask], 1);
      }
    }
    __syncthreads();
    find_bin(wanted, shared);
    wanted -= shared.above;
    prefix |= static_cast<uint32_t>(shared.bin) << shift;
    decided |= mask << shift;
    // All of the bin: no need to look at its lower digits.
    if (shared.bin_count == wanted) return {prefix == 0 ? 0 : prefix - 1, 0};
    __syncthreads();  // all have read what find_bin() found
  }
  return {prefix, wanted};
}

/// Calls write(place, item) for each chosen key, places in the order of the keys; returns how many.
template <int kThreads, typename Write>
__device__ inline int choose_keys(const uint32_t (&keys)[kItems], Threshold threshold,
                                  TopKShared<kThreads>& shared, const Write& write) {
  int counts = 0;  // above the threshold, and equal to it in the upper 16 bits
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    counts += keys[i] > threshold.key ? 1 : keys[i] == threshold.key && threshold.ties ? 65536 : 0;
  }
  const int before = scan_block(counts, shared);
  int above = before & 0xffff;
  int equal = before >> 16;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool is_above = keys[i] > threshold.key;
    const bool is_tie = keys[i] == threshold.key && equal < threshold.ties;
    if (is_above || is_tie) {
      write(above + (equal < threshold.ties ? equal : threshold.ties), i);
    }
    above += is_above;
    equal += !is_above && keys[i] == threshold.key && threshold.ties;
  }
  const int all_equal = shared.total >> 16;
  return (shared.total & 0xffff) + (all_equal < threshold.ties ? all_equal : threshold.ties);
}

}  // namespace kvswap::cuda
