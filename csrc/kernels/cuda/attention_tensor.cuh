#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_job.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kvswap::cuda {

/// Decode attention of 16-bit elements on tensor cores, in the manner of flash decoding: a warp
/// takes 16 tokens at a time against 16 query rows.
///
/// K and V go from memory straight to the registers of the multiplication, 16 bytes a lane. That
/// works because a product does not mind in which order the values of head_dim are taken: lane
/// (g, c) = (lane / 4, lane % 4) reads values 8c .. 8c + 7 of a chunk of 32 of token g's K and
/// calls them k = 2c, 2c + 1, 2c + 8, 2c + 9 of two multiplications; the query stands in shared
/// memory in that order. Of V it reads values 8g .. 8g + 7 of a chunk of 64 for tokens 2c, 2c + 1,
/// 2c + 8 and 2c + 9; value 8g + i is column g of multiplication i. So the sums of multiplication i
/// in lane (g, c) belong to rows g and g + 8, values 16c + i and 16c + 8 + i.
template <typename T, int kChunks, PageFormat kFormat>  // of 64 values of head_dim
struct TensorAttention {
  static constexpr int kHeadDim = kChunks * 64;
  static constexpr int kKeyChunks = kChunks * 2;  // of 32 values
  static constexpr int kKeysHeld = kKeyChunks < 4 ? kKeyChunks : 4;
  static constexpr int kTokens = 16;
  // Beyond 128 values two warps share 16 tokens, each with the sums of one half of V's values.
  static constexpr int kParts = kChunks > 2 ? 2 : 1;
  static constexpr int kOwnChunks = kChunks / kParts;
  static constexpr int kTokenWarps = kAttentionWarps / kParts;

  struct Shared {
    SlotStage<kFormat> stage;
    uint4 query[kKeyChunks][2][32];  // [chunk][row half][lane]
    RowSums<kTensorRows> sums;
    RowValues<kTensorRows, kHeadDim> values;
  };

  __device__ TensorAttention(const AttentionJob& job, const AttentionPlace<kTensorRows>& place,
                             Shared& shared)
      : job(job),
        place(place),
        shared(shared),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        token_warp(warp / kParts),
        part(warp % kParts),
        g(lane / 4),
        c(lane % 4) {
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

  /// The query rows as operand a; rows and values that are not there are zeros.
  __device__ void stage_query() {
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
      shared.query[i / 64][i / 32 % 2][i % 32] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  /// Eight values of a token's K (side 0) or V (side 1), as they stand in its page; zeros where the
  /// slot is not seen or the row has ended.
  __device__ uint4 load(int slot, int side, int first) const {
    const bool is_there = shared.stage.positions[slot] != kUnseen && first < job.head_dim;
    return shared.stage.template load<T>(
        slot, side, side * static_cast<int64_t>(job.group_tokens) * job.head_dim + first, is_there);
  }

  __device__ static int value_slot(int i) { return i % 2 + i / 2 * 8; }

  __device__ void load_values(int slot, int chunk, uint4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = load(slot + 2 * c + value_slot(i), 1, chunk * 64 + g * 8);
    }
  }
  __device__ void decode_values(int slot, uint4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared.stage.template decode<T>(slot + 2 * c + value_slot(i), 1, values[i]);
    }
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
      shared.stage.template decode<T>(slot + g, 0, keys[0][i]);
      shared.stage.template decode<T>(slot + g + 8, 0, keys[1][i]);
    }
  }

  /// scores[tile of 8 tokens] += query rows times keys.
  __device__ void score(int first_chunk, const uint4 (&keys)[2][kKeysHeld],
                        float (&scores)[2][4]) const {
#pragma unroll
    for (int i = 0; i < kKeysHeld; ++i) {
      const uint4 low = shared.query[first_chunk + i][0][lane];
      const uint4 high = shared.query[first_chunk + i][1][lane];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 key = keys[tile][i];
        multiply_add<T>(scores[tile], low.x, high.x, low.y, high.y, key.x, key.y);
        multiply_add<T>(scores[tile], low.z, high.z, low.w, high.w, key.z, key.w);
      }
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
    const bool is_seen = shared.stage.positions[slot + lane % kTokens] != kUnseen;
    if (!__any_sync(kWholeWarp, is_seen)) return;
    uint4 keys[2][kKeysHeld];
    load_keys(slot, 0, keys);
    uint4 values[kOwnChunks][4];  // asked for before K is used, decoded after
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) load_values(slot, part * kOwnChunks + i, values[i]);
    float scores[2][4] = {};
    decode_keys(slot, keys);
    score(0, keys, scores);
#pragma unroll 1
    for (int chunk = kKeysHeld; chunk < kKeyChunks; chunk += kKeysHeld) {
      load_keys(slot, chunk, keys);
      decode_keys(slot, keys);
      score(chunk, keys, scores);
    }
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

  const AttentionJob& job;
  const AttentionPlace<kTensorRows>& place;
  Shared& shared;
  const int lane, warp, token_warp, part, g, c;
  int32_t last_position[2];
  float largest[2] = {never(), never()};
  float sum[2] = {0.0f, 0.0f};
  float output[kOwnChunks * 8][4] = {};
};

}  // namespace kvswap::cuda
