#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/project_tensor.cuh"
#include "kernels/low_rank_score.h"

namespace kvswap::cuda {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kTileTokens = 64;
inline constexpr int kTileColumns = 64;
inline constexpr int kStep = 32;  // dimensions at once
inline constexpr int kOwn = 4;    // tokens, and columns, of a thread
inline constexpr int kBlock = static_cast<int>(kSummaryBlock);

struct alignas(16) Tiles {
  float keys[kStep][kTileTokens + kOwn];  // the gap spares bank conflicts of the transposition
  float factors[kStep][kTileColumns];
};

/// Thread (x, y) of 16 x 16 has tokens 4y.. and columns 4x.. of a tile.
template <typename T>
struct KeyTile {
  const BatchProjectKeysArgs& args;
  const ProjectPiece& piece;
  int64_t first_token;
  Tiles& tiles;
  int x = static_cast<int>(threadIdx.x) % 16;
  int y = static_cast<int>(threadIdx.x) / 16;

  /// Dimensions [first, first + kStep) of one KV head's keys and of the projection.
  __device__ void load(int64_t head, int first, int64_t first_column) const {
    const int head_dim = static_cast<int>(args.head_dim);
    const T* keys = static_cast<const T*>(piece.keys) + head * args.head_stride;
#pragma unroll
    for (int i = 0; i < kStep * kTileTokens / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const int d = first + at % kStep;
      const int64_t token = first_token + at / kStep;
      const bool is_there = d < head_dim && token < piece.tokens;
      tiles.keys[at % kStep][at / kStep] =
          is_there ? to_float(keys[token * args.token_stride + d]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kStep * kTileColumns / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const int d = first + at / kTileColumns;
      const int64_t column = first_column + at % kTileColumns;
      const bool is_there = d < head_dim && column < args.rank;
      tiles.factors[at / kTileColumns][at % kTileColumns] =
          is_there ? args.projection[(head * head_dim + d) * args.rank + column] : 0.0f;
    }
  }

  __device__ void multiply(float (&sums)[kOwn][kOwn]) const {
#pragma unroll 8
    for (int d = 0; d < kStep; ++d) {
      const float4 k = *reinterpret_cast<const float4*>(&tiles.keys[d][y * kOwn]);
      const float4 f = *reinterpret_cast<const float4*>(&tiles.factors[d][x * kOwn]);
      const float keys[kOwn] = {k.x, k.y, k.z, k.w};
      const float factors[kOwn] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int t = 0; t < kOwn; ++t) {
#pragma unroll
        for (int r = 0; r < kOwn; ++r) sums[t][r] = fmaf(keys[t], factors[r], sums[t][r]);
      }
    }
  }

  /// sums[t][r] = the projected keys of the tile's columns from first_column on.
  __device__ void project(int64_t first_column, float (&sums)[kOwn][kOwn]) const {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (float& sum : row) sum = 0.0f;
    }
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      for (int first = 0; first < static_cast<int>(args.head_dim); first += kStep) {
        __syncthreads();
        load(head, first, first_column);
        __syncthreads();
        multiply(sums);
      }
    }
  }

  /// Raises each token's largest magnitude by those of this tile: over the 16 threads of a row.
  /// What is no number counts as infinite.
  __device__ void raise(const float (&sums)[kOwn][kOwn], float (&largest)[kOwn]) const {
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const float magnitude = fabsf(sums[t][r]);
        largest[t] = fmaxf(largest[t], magnitude == magnitude ? magnitude : always());
      }
#pragma unroll
      for (int bit = 1; bit < 16; bit *= 2) {
        largest[t] = fmaxf(largest[t], __shfl_xor_sync(kWholeWarp, largest[t], bit));
      }
    }
  }
};

template <typename S>
__device__ S to_summary(float value, float inverse) {
  if constexpr (sizeof(S) == 1) {
    const float level = inverse > 0.0f ? rintf(value * inverse) : 0.0f;
    return static_cast<int8_t>(fminf(fmaxf(level, -127.0f), 127.0f));
  } else {
    return from_float<S>(finite_or_nan(value));
  }
}

/// Grid: (tiles of 64 tokens, pieces). A block goes over all columns; for an int8 summary of more
/// than 64 it does so twice, since a row's scale must be known first.
template <typename T, typename S>
__global__ void __launch_bounds__(kThreads) project_pieces(BatchProjectKeysArgs args) {
  __shared__ Tiles tiles;
  constexpr bool kIsInt8 = sizeof(S) == 1;
  const ProjectPiece piece = args.pieces[blockIdx.y];
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTileTokens;
  if (first_token >= piece.tokens) return;
  const KeyTile<T> tile{args, piece, first_token, tiles};
  float sums[kOwn][kOwn];
  float largest[kOwn] = {};
  if (kIsInt8 && args.rank > kTileColumns) {
    for (int64_t column = 0; column < args.rank; column += kTileColumns) {
      tile.project(column, sums);
      tile.raise(sums, largest);
    }
  }
  for (int64_t column = 0; column < args.rank; column += kTileColumns) {
    tile.project(column, sums);
    if (kIsInt8 && args.rank <= kTileColumns) tile.raise(sums, largest);
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
      const int64_t token = first_token + tile.y * kOwn + t;
      if (token >= piece.tokens) break;
      const int64_t row = piece.first_row + token;
      const float scale = finite_or_nan(level_scale(largest[t], 127.0f));
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      if (kIsInt8 && column == 0 && tile.x == 0) piece.token_scale[row] = scale;
      S* target = static_cast<S*>(piece.summary) + row / kBlock * args.rank * kBlock + row % kBlock;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const int64_t at = column + tile.x * kOwn + r;
        if (at < args.rank) target[at * kBlock] = to_summary<S>(sums[t][r], inverse);
      }
    }
  }
}

/// Blocks that must fit a multiprocessor: as many as registers are enough for.
constexpr int tile_blocks(size_t summary_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
  return 1;
#else
  return summary_bytes == 2 ? 2 : 1;
#endif
}

/// The same of keys in bf16 and many tokens. Grid: (tiles of 256 tokens, pieces).
template <typename S>
__global__ void __launch_bounds__(ProjectTensor::kThreads, tile_blocks(sizeof(S)))
    project_tiles(BatchProjectKeysArgs args) {
  __shared__ ProjectTensor::Shared shared;
  constexpr bool kIsInt8 = sizeof(S) == 1;
  constexpr int kColumns = ProjectTensor::kColumns;
  const ProjectPiece& piece = args.pieces[blockIdx.y];  // read again at the end, not held
  if (static_cast<int64_t>(blockIdx.x) * ProjectTensor::kTokens >= piece.tokens) return;
  const ProjectTensor tile(args, piece, shared);
  ProjectTensor::Sums sums;
  float largest[2][2] = {};
  if (kIsInt8 && args.rank > kColumns) {
    for (int column = 0; column < args.rank; column += kColumns) {
      tile.project(column, sums);
      tile.raise(sums, largest);
    }
  }
  for (int column = 0; column < args.rank; column += kColumns) {
    tile.project(column, sums);
    if (kIsInt8 && args.rank <= kColumns) tile.raise(sums, largest);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = i / 2, half = i % 2;
      if (!tile.has_token(part, half)) continue;
      const int64_t row = piece.first_row + tile.token(part, half);
      const float scale = finite_or_nan(level_scale(largest[part][half], 127.0f));
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      if (kIsInt8 && column == 0 && tile.c == 0) piece.token_scale[row] = scale;
      S* target = static_cast<S*>(piece.summary) + row / kBlock * args.rank * kBlock + row % kBlock;
#pragma unroll
      for (int r = 0; r < ProjectTensor::kColumnTiles * 2; ++r) {
        const int at = column + r / 2 * 8 + tile.c * 2 + r % 2;
        if (at < args.rank) {
          target[at * kBlock] = to_summary<S>(sums[part][r / 2][half * 2 + r % 2], inverse);
        }
      }
    }
  }
}

/// Few tokens are not worth a tile of 256.
bool fits_tensor_cores(const BatchProjectKeysArgs& args) {
  return args.key_dtype == DType::kBFloat16 && args.tokens_max > kTileTokens &&
         args.head_dim % 8 == 0 && args.head_stride % 8 == 0 && args.token_stride % 8 == 0;
}

template <typename T>
Status project(const BatchProjectKeysArgs& args, void* stream) {
  constexpr const char* kWhere = "project_keys";
  if (fits_tensor_cores(args)) {
    const Grid grid = {.x = ceil_div(args.tokens_max, ProjectTensor::kTokens), .y = args.count};
    return with_summary_type(args.summary_dtype, [&](auto type) {
      using S = typename decltype(type)::Type;
      return launch(kWhere, stream, grid, ProjectTensor::kThreads, project_tiles<S>, args);
    });
  }
  const Grid grid = {.x = ceil_div(args.tokens_max, kTileTokens), .y = args.count};
  return with_summary_type(args.summary_dtype, [&](auto type) {
    using S = typename decltype(type)::Type;
    return launch(kWhere, stream, grid, kThreads, project_pieces<T, S>, args);
  });
}

}  // namespace

Status project_keys(const BatchProjectKeysArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("project_keys", args.key_dtype));
  return with_floating(args.key_dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return project<T>(args, stream);
  });
}

}  // namespace kvswap::cuda
