#pragma once

#include "kernels/linear_rows.h"

namespace kvswap {

/// Asks for kBytes: the weights that come next, of which several rows are read at a time. By
/// itself the CPU foresees where one row goes on, not where short ones end.
template <int64_t kBytes>
inline void fetch_ahead(const void* from) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t at = 0; at < kBytes; at += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
  }
}

/// linear_rows() of bf16 by products of pairs, outputs begin..end - 1; only where has_bf16_pairs().
void linear_outputs_by_pairs(const LinearRowsArgs& args, int64_t begin, int64_t end);

}  // namespace kvswap
