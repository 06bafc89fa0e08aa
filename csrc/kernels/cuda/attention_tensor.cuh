#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/tensor_keys.cuh"

namespace kvswap::cuda {

/// Decode attention of 16-bit elements on tensor cores, in the manner of flash decoding: a warp
/// takes 16 tokens at a time against 16 query rows.
///
/// V goes from memory straight to the registers of the multiplication, as K does in TensorKeys.
/// Lane (g, c) reads values 8g .. 8g + 7 of a chunk of 64 for tokens 2c, 2c + 1, 2c + 8 and 2c + 9;
/// value 8g + i is column g of multiplication i. So the sums of multiplication i in lane (g, c)
/// belong to rows g and g + 8, values 16c + i and 16c + 8 + i.
template <typename T, int kChunks, PageFormat kFormat>  // of 64 values of head_dim
struct TensorAttention : TensorKeys<T, kChunks, kFormat> {
  using Keys = TensorKeys<T, kChunks, kFormat>;
  using Keys::c;
  using Keys::g;
  using Keys::job;
  using Keys::kTokens;
  using Keys::lane;
  using Keys::place;
  using Keys::warp;
  static constexpr int kHeadDim = kChunks * 64;
  // Beyond 128 values two warps share 16 tokens, each with the sums of one half of V's values.
  static constexpr int kParts = kChunks > 2 ? 2 : 1;
  static constexpr int kOwnChunks = kChunks / kParts;
  static constexpr int kTokenWarps = kAttentionWarps / kParts;

  struct Shared : Keys::Shared {
    RowSums<kTensorRows> sums;
    RowValues<kTensorRows, kHeadDim> values;
  };

  __device__ TensorAttention(const AttentionJob& job, const AttentionPlace<kTensorRows>& place,
                             Shared& shared)
      : Keys(job, place, shared), shared(shared), token_warp(warp / kParts), part(warp % kParts) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + half * 8;
      last_position[half] = row < place.rows ? place.position_of(job, row) : -1;
      if (job.sinks != nullptr && place.split == 0 && token_warp == 0 && row < place.rows) {
        largest[half] = job.sink_power_of_2(place.head_of(job, row));
        sum[half] = c == 0 ? 1.0f : 0.0f;  // the lanes of a row are summed
      }
    }
  }

  __device__ static int value_slot(int i) { return i % 2 + i / 2 * 8; }

  __device__ void load_values(int slot, int chunk, uint4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = this->load(slot + 2 * c + value_slot(i), 1, chunk * 64 + g * 8);
    }
  }
  __device__ void decode_values(int slot, uint4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared.stage.template decode<T>(slot + 2 * c + value_slot(i), 1, values[i]);
    }
  }

  /// Scores to weights, as operand a of the second product; what was summed so far decays.
  __device__ void weigh(int slot, float (&scores)[2][4], uint32_t (&weights)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_largest = never();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = shared.stage.positions[slot + i / 2 * 8 + 2 * c + i % 2];
        float& score = scores[i / 2][half * 2 + i % 2];
        score = position <= last_position[half] ? job.power_of_2(score) : never();
        tile_largest = fmaxf(tile_largest, score);
      }
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(kWholeWarp, tile_largest, 1));
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(kWholeWarp, tile_largest, 2));
      const float now = fmaxf(largest[half], tile_largest);
      const float base = now == never() ? 0.0f : now;
      const float decay = exp2f(largest[half] - base);
      largest[half] = now;
      sum[half] *= decay;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float low = exp2f(scores[tile][half * 2] - base);
        const float high = exp2f(scores[tile][half * 2 + 1] - base);
        sum[half] += low + high;
        weights[half + 2 * tile] = pack_pair<T>(low, high);
      }
#pragma unroll
      for (int i = 0; i < kOwnChunks * 8; ++i) {
        output[i][half * 2] *= decay;
        output[i][half * 2 + 1] *= decay;
      }
    }
  }

  /// Adds weights times the values of one chunk.
  __device__ void add_values(int chunk, const uint32_t (&weights)[4], const uint4 (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t selector = i % 2 == 0 ? 0x5410u : 0x7632u;
      const auto word = [&](const uint4& v) {
        return i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
      };
      const uint32_t b0 = __byte_perm(word(values[0]), word(values[1]), selector);
      const uint32_t b1 = __byte_perm(word(values[2]), word(values[3]), selector);
      multiply_add<T>(output[chunk * 8 + i], weights[0], weights[1], weights[2], weights[3], b0,
                      b1);
    }
  }

  /// Sixteen tokens from stage slot `slot` on.
  __device__ void attend(int slot) {
    if (!this->is_any_seen(slot)) return;
    uint4 keys[2][Keys::kKeysHeld];
    this->load_keys(slot, 0, keys);
    uint4 values[kOwnChunks][4];  // asked for before K is used, decoded after
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) load_values(slot, part * kOwnChunks + i, values[i]);
    float scores[2][4] = {};
    this->score_all(slot, keys, scores);
    uint32_t weights[4];
    weigh(slot, scores, weights);
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      decode_values(slot, values[i]);
      add_values(i, weights, values[i]);
    }
  }

  /// Joins the warps, one after the other: the order of the sums is fixed.
  __device__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(kWholeWarp, sum[half], 1);
      sum[half] += __shfl_xor_sync(kWholeWarp, sum[half], 2);
      if (c == 0) {
        // Warps that share tokens have the same sums: one of them counts.
        shared.sums.largest[warp][g + half * 8] = part == 0 ? largest[half] : never();
        shared.sums.sum[warp][g + half * 8] = part == 0 ? sum[half] : 0.0f;
      }
    }
    __syncthreads();
    const int counting = warp - part;
    const float factors[2] = {shared.sums.factor_of(counting, g),
                              shared.sums.factor_of(counting, g + 8)};
    for (int turn = 0; turn < kAttentionWarps; ++turn) {
      if (turn == warp) add_to_shared(factors, token_warp == 0);
      __syncthreads();
    }
    write_rows<T>(job, place, shared.values, shared.sums);
  }

  __device__ void add_to_shared(const float (&factors)[2], bool is_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
        const int vector = (part * kOwnChunks + chunk) * 16 + c * 4;
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {  // four values of 16 that lie side by side
          float4& target = shared.values.values[g + half * 8][vector + quad];
          const int first = chunk * 8 + quad % 2 * 4;
          const int at = half * 2 + quad / 2;
          const float4 before = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : target;
          target = make_float4(before.x + output[first][at] * factors[half],
                               before.y + output[first + 1][at] * factors[half],
                               before.z + output[first + 2][at] * factors[half],
                               before.w + output[first + 3][at] * factors[half]);
        }
      }
    }
  }

  Shared& shared;
  const int token_warp, part;
  int32_t last_position[2];
  float largest[2] = {never(), never()};
  float sum[2] = {0.0f, 0.0f};
  float output[kOwnChunks * 8][4] = {};
};

}  // namespace kvswap::cuda
