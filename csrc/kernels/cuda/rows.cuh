#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace kvswap::cuda {

/// Rows of head_dim elements, each by a team of 1..32 neighbouring lanes of a warp: a lane takes
/// vectors lane, lane + team, ... of `width` elements. A row of up to 32 vectors takes one round.
struct RowTeams {
  int64_t rows = 0;
  int vectors = 0;  // of a row
  int team = 1;     // lanes: 2^team_bits
  int team_bits = 0;
};

inline constexpr int kRowThreads = 256;
inline constexpr int kRowElements = 8;  // of a lane's vector, where head_dim is a multiple

/// `width` elements in a vector.
inline RowTeams row_teams(int64_t rows, int64_t head_dim, int width) {
  RowTeams teams{.rows = rows, .vectors = static_cast<int>(head_dim / width)};
  while (teams.team < 32 && teams.team < teams.vectors) teams.team = 1 << ++teams.team_bits;
  return teams;
}

inline Grid row_grid(const RowTeams& teams) {
  return {.x = ceil_div(teams.rows * teams.team, kRowThreads)};
}

/// Where a thread stands. Threads past the last row go along, so that warps stay whole.
struct RowPlace {
  __device__ explicit RowPlace(const RowTeams& teams)
      : lane(static_cast<int>(threadIdx.x) & (teams.team - 1)),
        row((static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) >> teams.team_bits),
        is_inside(row < teams.rows) {}

  int lane;
  int64_t row;
  bool is_inside;
};

template <typename T, int kWidth>
__device__ inline void load_row(const T* source, float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = to_float(*source);
  } else {
#pragma unroll
    for (int part = 0; part < kWidth / kVector<T>; ++part) {
      float some[kVector<T>];
      unpack<T>(load_vector(source + part * kVector<T>), some);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) values[part * kVector<T> + i] = some[i];
    }
  }
}

template <typename T, int kWidth>
__device__ inline void store_row(T* target, const float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    *target = from_float<T>(values[0]);
  } else {
#pragma unroll
    for (int part = 0; part < kWidth / kVector<T>; ++part) {
      float some[kVector<T>];
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) some[i] = values[part * kVector<T> + i];
      store_vector(target + part * kVector<T>, pack<T>(some));
    }
  }
}

}  // namespace kvswap::cuda
