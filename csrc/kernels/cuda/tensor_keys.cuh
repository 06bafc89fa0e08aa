#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_job.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kvswap::cuda {

/// Scores of 16-bit keys in pages on tensor cores: a warp takes 16 tokens at a time against 16
/// query rows.
///
/// Keys go from memory straight to the registers of the multiplication, 16 bytes a lane. That works
/// because a product does not mind in which order the values of head_dim are taken: lane
/// (g, c) = (lane / 4, lane % 4) reads values 8c .. 8c + 7 of a chunk of 32 of token g's K and
/// calls them k = 2c, 2c + 1, 2c + 8, 2c + 9 of two multiplications; the query stands in shared
/// memory in that order.
template <typename T, int kChunks, PageFormat kFormat>  // of 64 values of head_dim
struct TensorKeys {
  static constexpr int kKeyChunks = kChunks * 2;  // of 32 values
  static constexpr int kKeysHeld = kKeyChunks < 4 ? kKeyChunks : 4;
  static constexpr int kTokens = 16;

  struct Shared {
    SlotStage<kFormat> stage;
    uint4 query[kKeyChunks][2][32];  // [chunk][row half][lane]
  };

  __device__ TensorKeys(const AttentionJob& job, const AttentionPlace<kTensorRows>& place,
                        Shared& shared)
      : job(job),
        place(place),
        shared_keys(shared),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        g(lane / 4),
        c(lane % 4) {}

  /// The query rows as operand a; rows and values that are not there are zeros.
  __device__ void stage_query() const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kKeyChunks * 64; i += kAttentionThreads) {
      const int row = i % 32 / 4 + i / 32 % 2 * 8;
      const int first = i / 64 * 32 + i % 4 * 8;
      uint32_t words[4] = {0, 0, 0, 0};
      if (row < place.rows && first < job.head_dim) {
        // The caller's strides may be odd: one element at a time.
        const T* source = place.template query_row<T>(job, row) + first;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[w] = source[2 * w].bits | static_cast<uint32_t>(source[2 * w + 1].bits) << 16;
        }
      }
      shared_keys.query[i / 64][i / 32 % 2][i % 32] =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  /// Eight values of a token's K (side 0) or V (side 1), as they stand in its page; zeros where the
  /// slot is not seen or the row has ended.
  __device__ uint4 load(int slot, int side, int first) const {
    const bool is_there = shared_keys.stage.positions[slot] != kUnseen && first < job.head_dim;
    return shared_keys.stage.template load<T>(
        slot, side, side * static_cast<int64_t>(job.group_tokens) * job.head_dim + first, is_there);
  }

  __device__ void load_keys(int slot, int first_chunk, uint4 (&keys)[2][kKeysHeld]) const {
#pragma unroll
    for (int i = 0; i < kKeysHeld; ++i) {
      keys[0][i] = load(slot + g, 0, (first_chunk + i) * 32 + c * 8);
      keys[1][i] = load(slot + g + 8, 0, (first_chunk + i) * 32 + c * 8);
    }
  }
  __device__ void decode_keys(int slot, uint4 (&keys)[2][kKeysHeld]) const {
#pragma unroll
    for (int i = 0; i < kKeysHeld; ++i) {
      shared_keys.stage.template decode<T>(slot + g, 0, keys[0][i]);
      shared_keys.stage.template decode<T>(slot + g + 8, 0, keys[1][i]);
    }
  }

  /// scores[tile of 8 tokens] += query rows times keys.
  __device__ void score(int first_chunk, const uint4 (&keys)[2][kKeysHeld],
                        float (&scores)[2][4]) const {
#pragma unroll
    for (int i = 0; i < kKeysHeld; ++i) {
      const uint4 low = shared_keys.query[first_chunk + i][0][lane];
      const uint4 high = shared_keys.query[first_chunk + i][1][lane];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 key = keys[tile][i];
        multiply_add<T>(scores[tile], low.x, high.x, low.y, high.y, key.x, key.y);
        multiply_add<T>(scores[tile], low.z, high.z, low.w, high.w, key.z, key.w);
      }
    }
  }

  /// Whether any of the 16 slots from `slot` on holds a token that a query may see.
  __device__ bool is_any_seen(int slot) const {
    return __any_sync(kWholeWarp, shared_keys.stage.positions[slot + lane % kTokens] != kUnseen);
  }

  /// All scores of 16 tokens whose first kKeysHeld chunks are in `keys`.
  __device__ void score_all(int slot, uint4 (&keys)[2][kKeysHeld], float (&scores)[2][4]) const {
    decode_keys(slot, keys);
    score(0, keys, scores);
#pragma unroll 1
    for (int chunk = kKeysHeld; chunk < kKeyChunks; chunk += kKeysHeld) {
      load_keys(slot, chunk, keys);
      decode_keys(slot, keys);
      score(chunk, keys, scores);
    }
  }

  const AttentionJob& job;
  const AttentionPlace<kTensorRows>& place;
  Shared& shared_keys;
  const int lane, warp, g, c;
};

}  // namespace kvswap::cuda
