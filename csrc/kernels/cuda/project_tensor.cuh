#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/tensor_core.cuh"

namespace kvswap::cuda {

/// Keys in bf16 times a projection in fp32, on tensor cores: a warp has 32 tokens and 64 columns.
///
/// A factor counts as the sum of two numbers in bf16, which leaves 2^-17 of it; keys are exact. As
/// in TensorKeys lane (g, c) reads values 8c .. 8c + 7 of a chunk of 32 of token g's keys, of which
/// each of two multiplications takes four; the factors stand in shared memory in that order.
struct ProjectTensor {
  static constexpr int kThreads = 256;
  static constexpr int kWarpTokens = 32;
  static constexpr int kTokens = kThreads / 32 * kWarpTokens;
  static constexpr int kColumns = 64;
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kChunk = 32;  // values of head_dim
  static constexpr int kOwnFactors = kColumnTiles * 2 * 32 / kThreads;

  /// Of one chunk: for each lane four factors of a column, their first parts and what these leave.
  struct Shared {
    uint4 factors[2][kColumnTiles][2][32];  // [in turns][tile][multiplication][lane]
  };
  using Sums = float[2][kColumnTiles][4];  // [16 tokens][tile]: as multiply_add() has them

  __device__ ProjectTensor(const BatchProjectKeysArgs& args, const ProjectPiece& piece,
                           Shared& shared)
      : args(args),
        shared(shared),
        lane(static_cast<int>(threadIdx.x) % 32),
        g(lane / 4),
        c(lane % 4),
        tokens_left(static_cast<int>(
            piece.tokens - token(0, 0) < kTokens ? piece.tokens - token(0, 0) : kTokens)),
        own_keys(static_cast<const BFloat16*>(piece.keys) + token(0, 0) * args.token_stride +
                 c * 8),
        is_aligned((reinterpret_cast<uintptr_t>(piece.keys) & (kVectorBytes - 1)) == 0) {}

  /// The token of sums[part][..][2 * half ..].
  __device__ int64_t token(int part, int half) const {
    return static_cast<int64_t>(blockIdx.x) * kTokens +
           static_cast<int>(threadIdx.x) / 32 * kWarpTokens + part * 16 + half * 8 + g;
  }
  __device__ bool has_token(int part, int half) const { return part * 16 + half * 8 < tokens_left; }

  /// Where a chunk stands: in which KV head, from which of its values on.
  struct Chunk {
    int head = 0;
    int first = 0;

    __device__ void advance(int head_dim) {
      first += kChunk;
      if (first < head_dim) return;
      first = 0;
      ++head;
    }
  };

  /// Values 8c .. 8c + 7 of a chunk, for tokens g and g + 8 of both sixteens.
  __device__ void load_keys(const Chunk& chunk, uint4 (&keys)[2][2]) const {
    const BFloat16* const first = own_keys + chunk.head * args.head_stride + chunk.first;
    const bool is_inside = chunk.first + c * 8 < args.head_dim;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      uint4& key = keys[row / 2][row % 2];
      key = make_uint4(0, 0, 0, 0);
      if (!is_inside || !has_token(row / 2, row % 2)) continue;
      const BFloat16* source = first + row * 8 * args.token_stride;
      if (is_aligned) {
        key = load_vector(source);
      } else {
        const auto pair = [&](int at) {
          return source[at].bits | static_cast<uint32_t>(source[at + 1].bits) << 16;
        };
        key = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
  }

  /// This thread's factors of a chunk, as they stand in the projection: of columns 32 apart.
  __device__ void load_factors(const Chunk& chunk, int first_column,
                               float (&factors)[kOwnFactors][4]) const {
    const int at = static_cast<int>(threadIdx.x);
    const int first = chunk.first + at % 4 * 8 + at / 32 % 2 * 4;
    const int column = first_column + at / 64 * 8 + at % 32 / 4;
    const float* source =
        args.projection + (chunk.head * args.head_dim + first) * args.rank + column;
#pragma unroll
    for (int i = 0; i < kOwnFactors; ++i) {
      const bool is_there =
          first < args.head_dim && column + i * kColumns / kOwnFactors < args.rank;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        factors[i][d] = is_there ? source[d * args.rank + i * kColumns / kOwnFactors] : 0.0f;
      }
    }
  }

  __device__ void store_factors(int step, const float (&factors)[kOwnFactors][4]) const {
#pragma unroll
    for (int i = 0; i < kOwnFactors; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      float rest[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        rest[d] = factors[i][d] - to_float(from_float<BFloat16>(factors[i][d]));
      }
      shared.factors[step % 2][at / 64][at / 32 % 2][at % 32] =
          make_uint4(pack_pair<BFloat16>(factors[i][0], factors[i][1]),
                     pack_pair<BFloat16>(factors[i][2], factors[i][3]),
                     pack_pair<BFloat16>(rest[0], rest[1]), pack_pair<BFloat16>(rest[2], rest[3]));
    }
  }

  __device__ void multiply(int step, const uint4 (&keys)[2][2], Sums& sums) const {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const uint4 factors = shared.factors[step % 2][tile][which][lane];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint4 low = keys[part][0];
          const uint4 high = keys[part][1];
          const uint32_t a0 = which == 0 ? low.x : low.z, a1 = which == 0 ? high.x : high.z;
          const uint32_t a2 = which == 0 ? low.y : low.w, a3 = which == 0 ? high.y : high.w;
          multiply_add<BFloat16>(sums[part][tile], a0, a1, a2, a3, factors.x, factors.y);
          multiply_add<BFloat16>(sums[part][tile], a0, a1, a2, a3, factors.z, factors.w);
        }
      }
    }
  }

  /// sums = the projected keys of 64 columns from first_column on, by all threads of a block.
  __device__ void project(int first_column, Sums& sums) const {
#pragma unroll
    for (auto& part : sums) {
#pragma unroll
      for (auto& tile : part) {
#pragma unroll
        for (float& sum : tile) sum = 0.0f;
      }
    }
    Chunk chunk;
    uint4 keys[2][2];
    float factors[kOwnFactors][4];
    load_keys(chunk, keys);
    load_factors(chunk, first_column, factors);
    __syncthreads();  // nobody reads what stood here any more
#pragma unroll 1
    for (int step = 0;; ++step) {
      store_factors(step, factors);
      __syncthreads();
      chunk.advance(static_cast<int>(args.head_dim));
      const bool is_last = chunk.head == args.kv_heads;
      // On their way: factors while this chunk is multiplied, keys while the next is staged.
      if (!is_last) load_factors(chunk, first_column, factors);
      multiply(step, keys, sums);
      if (is_last) return;
      load_keys(chunk, keys);
    }
  }

  /// Raises each token's largest magnitude by those of these columns. What is no number counts as
  /// infinite.
  __device__ void raise(const Sums& sums, float (&largest)[2][2]) const {
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      float& of_row = largest[row / 2][row % 2];
#pragma unroll
      for (int i = 0; i < kColumnTiles * 2; ++i) {
        const float magnitude = fabsf(sums[row / 2][i / 2][row % 2 * 2 + i % 2]);
        of_row = fmaxf(of_row, magnitude == magnitude ? magnitude : always());
      }
      of_row = fmaxf(of_row, __shfl_xor_sync(kWholeWarp, of_row, 1));
      of_row = fmaxf(of_row, __shfl_xor_sync(kWholeWarp, of_row, 2));
    }
  }

  const BatchProjectKeysArgs& args;
  Shared& shared;
  const int lane, g, c;
  const int tokens_left;  // from this lane's first on, at most a block's
  const BFloat16* const own_keys;
  const bool is_aligned;
};

}  // namespace kvswap::cuda
