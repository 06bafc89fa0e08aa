#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// Tokens per block of a summary: 16 rows stand side by side, so that one rank of 16 tokens is one
/// vector and a score needs no sum across lanes.
inline constexpr int64_t kSummaryBlock = 16;

struct LowRankScoreArgs {
  const void* summary = nullptr;       // [blocks, rank, 16]: low-rank keys; int4: see int4_rows.h
  const float* token_scale = nullptr;  // [blocks, 16]: int8 and int4 only, else null
  const float* query = nullptr;        // [queries, rank]
  float* scores = nullptr;             // [queries, score_stride >= blocks * 16]
  int64_t score_stride = 0;            // elements between two queries' scores
  const void* next_summary = nullptr;  // scored after this, if known: asked for ahead
  const float* next_scale = nullptr;
  int64_t blocks = 0;
  int64_t rank = 0;
  int64_t queries = 0;
  DType dtype = DType::kFloat32;
};

/// scores[q, t] = sum_r query[q, r] * summary[t, r] (* token_scale[t]): KVSwap section 3.3, eq. 1,
/// with the projected queries of all heads summed first (the sum over heads is linear).
///
/// One contiguous piece of a summary; the caller splits work over threads.
void low_rank_score(const LowRankScoreArgs& args);

}  // namespace kvswap
