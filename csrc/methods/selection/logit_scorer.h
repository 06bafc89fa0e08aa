#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "methods/selection/selector.h"
#include "methods/summary/key_summary.h"

namespace kvswap {

/// A layer's queries over one sequence's summary.
struct ProductArgs {
  const KeySummary* summary = nullptr;
  const float* asked = nullptr;  // [queries, vectors, rank]
  const Candidates* candidates = nullptr;
  int64_t queries = 0;
  int64_t vectors = 1;         // of each query; a row is worth the one it is worth most to
  int64_t tokens_per_row = 1;  // 1, or group_tokens
  int64_t groups = 0;
  int64_t group_tokens = 0;
  int64_t wanted = 0;             // groups that are chosen of each query's, at most
  double share = 0;               // of the blocks, scored in a second stage
  float* group_scores = nullptr;  // [queries, groups] out; -inf: never
};

/// Scores groups by their largest product (KVSwap 3.3), in two stages where the summary's first
/// columns stand apart: of each chunk every group by these alone; then, by all columns, the groups
/// in its best blocks, a share of them. A block is worth its best group, and is 16 tokens, or the
/// next larger number of whole blocks and whole groups. Where that is less than the groups that
/// are wanted, as many blocks are taken of the whole. Other groups are not chosen.
///
/// Not exact: what is missed is what the first columns rank behind a share of its neighbours. The
/// blocks are the best of their chunk, not of all, so that the rest of a row is read while the
/// first columns are in the nearest cache, and no choice among all blocks comes between.
///
/// The same scores for any number of threads. Keeps scratch from call to call; not thread-safe.
class LogitScorer {
 public:
  /// Of all sequences of a layer.
  void score(std::span<const ProductArgs> sequences, const ParallelFor* parallel);
  void clear() { asked_apart_ = {}; }

  /// What it keeps where columns stand apart: as much as is asked.
  static int64_t scratch_bytes(int64_t vectors, int64_t rank) {
    return vectors * rank * int64_t{sizeof(float)};
  }

 private:
  std::vector<float> asked_apart_;  // [sequences][vectors, first columns], [vectors, the rest]
};

}  // namespace kvswap
