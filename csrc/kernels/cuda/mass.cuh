#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace kvswap::cuda {

inline constexpr int kMassThreads = 128;
inline constexpr int kMassWarps = kMassThreads / 32;
inline constexpr int kMassDimMax = 256;  // 8 values of a key a lane

/// The queries whose weights are averaged, those of one KV head at a time.
struct MassQueries {
  const void* query = nullptr;  // [batch, heads, queries, head_dim], strides below
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
  const float* log_sum_exp = nullptr;  // [batch, heads, queries]
  int ratio = 1;                       // query heads of a KV head
  int kv_heads = 1;
  int queries = 1;
  int head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;

  __device__ float score(float product) const {
    return softcap > 0.0f ? softcap * tanhf(product * scale / softcap) : product * scale;
  }
  template <typename T>
  __device__ const T* row(int64_t sequence, int64_t head, int64_t at) const {
    return static_cast<const T*>(query) + sequence * batch_stride + head * head_stride +
           at * token_stride;
  }
  __device__ int64_t place(int64_t sequence, int64_t head, int64_t at) const {
    return (sequence * kv_heads * ratio + head) * queries + at;
  }
};

/// One key, spread over the lanes of a warp.
struct MassKey {
  float values[kMassDimMax / 32] = {};

  template <typename Key>
  __device__ MassKey(const Key* key, int head_dim, int lane, float factor = 1.0f) {
#pragma unroll
    for (int i = 0; i < kMassDimMax / 32; ++i) {
      const int d = i * 32 + lane;
      if (d < head_dim) values[i] = to_float(key[d]) * factor;
    }
  }

  /// The product with a query, in all lanes; summed in a fixed order.
  template <typename T>
  __device__ float product(const T* query, int head_dim, int lane) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMassDimMax / 32; ++i) {
      const int d = i * 32 + lane;
      if (d < head_dim) sum = fmaf(to_float(query[d]), values[i], sum);
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, bit);
    return sum;
  }
};

/// A key's mean weight and mean squared weight, by a whole warp; the key stands at `position`,
/// query i at first_position + i.
template <typename T>
__device__ void weigh_key(const MassQueries& queries, int64_t sequence, int64_t kv_head,
                          const MassKey& own, int64_t position, int64_t first_position, float& mean,
                          float& square) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  mean = square = 0.0f;
  for (int row = 0; row < queries.ratio * queries.queries; ++row) {
    const int64_t head = kv_head * queries.ratio + row / queries.queries;
    const int64_t at = row % queries.queries;
    const float total = queries.log_sum_exp[queries.place(sequence, head, at)];
    // The same for all lanes: a shuffle needs them all.
    if (position > first_position + at || total == never()) continue;
    const T* query = queries.template row<T>(sequence, head, at);
    const float weight = expf(queries.score(own.product(query, queries.head_dim, lane)) - total);
    mean += weight;
    square = fmaf(weight, weight, square);
  }
  const float rows = static_cast<float>(queries.ratio * queries.queries);
  mean /= rows;
  square /= rows;
}

}  // namespace kvswap::cuda
