#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_job.cuh"
#include "kernels/cuda/score.cuh"

namespace kvswap::cuda {

/// Decode attention in fp32: a warp takes 8 tokens at a time against 4 query rows. A lane holds 4
/// values of each chunk of 128 of head_dim; after reduce_scatter() it holds the one score of its
/// own row and token.
template <int kChunks, PageFormat kFormat>  // of 128 values of head_dim
struct ScalarAttention {
  static constexpr int kHeadDim = kChunks * 128;
  static constexpr int kTokens = 8;
  static constexpr int kTokenWarps = kAttentionWarps;
  static_assert(kTokens * kScalarRows == 32);

  struct Shared {
    SlotStage<kFormat> stage;
    RowSums<kScalarRows> sums;
    RowValues<kScalarRows, kHeadDim> values;
  };

  __device__ ScalarAttention(const AttentionJob& job, const AttentionPlace<kScalarRows>& place,
                             Shared& shared)
      : job(job),
        place(place),
        shared(shared),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        token_warp(warp),
        own(lane_of(lane)) {
    const int row = own / kTokens;
    last_position = row < place.rows ? place.position_of(job, row) : -1;
    if (job.sinks != nullptr && place.split == 0 && warp == 0 && row < place.rows) {
      largest = job.sink_power_of_2(place.head_of(job, row));
      sum = own % kTokens == 0 ? 1.0f : 0.0f;  // the lanes of a row are summed
    }
  }

  /// Which of the 32 sums (row * 8 + token) a lane is left with, and the way back: reversed bits.
  __host__ __device__ static constexpr int lane_of(int index) {
    return (index & 1) << 4 | (index & 2) << 2 | (index & 4) | (index & 8) >> 2 | (index & 16) >> 4;
  }

  __device__ void stage_query() {
#pragma unroll
    for (int row = 0; row < kScalarRows; ++row) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int first = chunk * 128 + lane * 4;
        const bool is_there = row < place.rows && first < job.head_dim;
        const float* source =
            is_there ? place.template query_row<float>(job, row) + first : nullptr;
#pragma unroll
        for (int i = 0; i < 4; ++i) query[row][chunk][i] = is_there ? source[i] : 0.0f;
      }
    }
  }

  /// Four values of a token's K (side 0) or V (side 1), as they stand in its page; zeros where the
  /// slot is not seen or the row has ended.
  __device__ uint4 load(int slot, int side, int first) const {
    const bool is_there = shared.stage.positions[slot] != kUnseen && first < job.head_dim;
    return shared.stage.template load<float>(
        slot, side, side * static_cast<int64_t>(job.group_tokens) * job.head_dim + first, is_there);
  }
  __device__ float4 decoded(int slot, int side, uint4 held) const {
    shared.stage.template decode<float>(slot, side, held);
    return make_float4(__uint_as_float(held.x), __uint_as_float(held.y), __uint_as_float(held.z),
                       __uint_as_float(held.w));
  }

  __device__ float score(int slot) const {
    float sums[32] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 held[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) held[t] = load(slot + t, 0, chunk * 128 + lane * 4);
      float4 keys[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) keys[t] = decoded(slot + t, 0, held[t]);
#pragma unroll
      for (int row = 0; row < kScalarRows; ++row) {
        const float (&q)[4] = query[row][chunk];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          float& sum = sums[row * kTokens + t];
          sum = fmaf(q[0], keys[t].x, sum);
          sum = fmaf(q[1], keys[t].y, sum);
          sum = fmaf(q[2], keys[t].z, sum);
          sum = fmaf(q[3], keys[t].w, sum);
        }
      }
    }
    return reduce_scatter<32, 1>(sums, lane);
  }

  /// Eight tokens from stage slot `slot` on.
  __device__ void attend(int slot) {
    const int32_t position = shared.stage.positions[slot + own % kTokens];
    if (!__any_sync(kWholeWarp, position != kUnseen)) return;
    const float sum_of_products = score(slot);
    const float own_score = position <= last_position ? job.power_of_2(sum_of_products) : never();
    // The lanes of one row differ in the bits 16, 8 and 4.
    float largest_now = own_score;
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) {
      largest_now = fmaxf(largest_now, __shfl_xor_sync(kWholeWarp, largest_now, bit));
    }
    largest_now = fmaxf(largest_now, largest);
    const float base = largest_now == never() ? 0.0f : largest_now;
    const float decay = exp2f(largest - base);
    largest = largest_now;
    const float weight = exp2f(own_score - base);
    sum = sum * decay + weight;
    decay_output(decay);
    add_values(slot, weight);
  }

  __device__ void decay_output(float decay) {
#pragma unroll
    for (int row = 0; row < kScalarRows; ++row) {
      const float of_row = __shfl_sync(kWholeWarp, decay, lane_of(row * kTokens));
#pragma unroll
      for (int i = 0; i < kChunks * 4; ++i) output[row][i] *= of_row;
    }
  }

  __device__ void add_values(int slot, float weight) {
    constexpr int kTokensHeld = kTokens / kChunks;
#pragma unroll
    for (int first = 0; first < kTokens; first += kTokensHeld) {
      uint4 held[kTokensHeld][kChunks];
#pragma unroll
      for (int t = 0; t < kTokensHeld; ++t) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          held[t][chunk] = load(slot + first + t, 1, chunk * 128 + lane * 4);
        }
      }
#pragma unroll
      for (int t = 0; t < kTokensHeld; ++t) add_token(slot, first + t, weight, held[t]);
    }
  }

  __device__ void add_token(int slot, int token, float weight, const uint4 (&held)[kChunks]) {
    float weights[kScalarRows];
#pragma unroll
    for (int row = 0; row < kScalarRows; ++row) {
      weights[row] = __shfl_sync(kWholeWarp, weight, lane_of(row * kTokens + token));
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float4 value = decoded(slot + token, 1, held[chunk]);
#pragma unroll
      for (int row = 0; row < kScalarRows; ++row) {
        float* into = output[row] + chunk * 4;
        into[0] = fmaf(weights[row], value.x, into[0]);
        into[1] = fmaf(weights[row], value.y, into[1]);
        into[2] = fmaf(weights[row], value.z, into[2]);
        into[3] = fmaf(weights[row], value.w, into[3]);
      }
    }
  }

  /// Joins the warps, one after the other: the order of the sums is fixed.
  __device__ void finish() {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, bit);
    if (own % kTokens == 0) {
      shared.sums.largest[warp][own / kTokens] = largest;
      shared.sums.sum[warp][own / kTokens] = sum;
    }
    __syncthreads();
    for (int turn = 0; turn < kAttentionWarps; ++turn) {
      if (turn == warp) add_to_shared(turn == 0);
      __syncthreads();
    }
    write_rows<float>(job, place, shared.values, shared.sums);
  }

  __device__ void add_to_shared(bool is_first) {
#pragma unroll
    for (int row = 0; row < kScalarRows; ++row) {
      const float factor = shared.sums.factor_of(warp, row);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float4& target = shared.values.values[row][chunk * 32 + lane];
        const float4 before = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : target;
        const float* own_values = output[row] + chunk * 4;
        target = make_float4(before.x + own_values[0] * factor, before.y + own_values[1] * factor,
                             before.z + own_values[2] * factor, before.w + own_values[3] * factor);
      }
    }
  }

  const AttentionJob& job;
  const AttentionPlace<kScalarRows>& place;
  Shared& shared;
  const int lane, warp, token_warp;
  const int own;  // row * 8 + token
  int32_t last_position;
  float largest = never();
  float sum = 0.0f;
  float query[kScalarRows][kChunks][4];
  float output[kScalarRows][kChunks * 4] = {};
};

}  // namespace kvswap::cuda
