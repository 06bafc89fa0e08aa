#pragma once

#include <cstdint>

#include "kernels/low_rank_score.h"

namespace kvswap {

/// Columns of a query are padded with zeros to a multiple of this.
inline constexpr int64_t kInt8Columns = 4;

constexpr int64_t int8_stride(int64_t rank) {
  return (rank + kInt8Columns - 1) / kInt8Columns * kInt8Columns;
}

struct QuantizeQueriesArgs {
  const float* query = nullptr;  // [queries, rank]
  int8_t* quantized = nullptr;   // [queries, int8_stride(rank)] out: -127..127
  float* scales = nullptr;  // [queries] out: query = scale * quantized, about; NaN: not a number
  int64_t rank = 0;
  int64_t queries = 0;
};

/// One scale a query, as rows of a summary have one a token.
void quantize_queries(const QuantizeQueriesArgs& args);

struct Int8ScoreArgs {
  const int8_t* summary = nullptr;     // [blocks, rank, 16]
  const float* token_scale = nullptr;  // [blocks, 16]
  const int8_t* query = nullptr;       // [queries, int8_stride(rank)]: -127..127
  float* scores = nullptr;             // [queries, score_stride >= blocks * 16] out
  int64_t score_stride = 0;
  int64_t blocks = 0;
  int64_t rank = 0;  // at most 1024: sums stay exact in fp32 too
  int64_t queries = 0;
};

/// scores[q, t] = token_scale[t] * sum_r query[q, r] * summary[t, r]. The sums are whole numbers,
/// so the bits are the same on every CPU. A row is read once for 16 queries.
void int8_score(const Int8ScoreArgs& args);

}  // namespace kvswap
