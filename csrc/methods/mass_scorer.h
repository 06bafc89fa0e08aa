#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/group_mass.h"
#include "methods/selector.h"
#include "methods/summary.h"

namespace kvswap {

/// One query over one sequence's summary.
struct MassArgs {
  const Summary* summary = nullptr;
  const float* query = nullptr;  // [heads, rank]: each head's own, times attention's scale
  const float* kept_log_sum_exp = nullptr;  // one a head, `kept_stride` apart
  int64_t kept_stride = 1;
  const Candidates* candidates = nullptr;
  int64_t heads = 0;
  int64_t groups = 0;
  HeadJoin join = HeadJoin::kSum;
  const ParallelFor* parallel = nullptr;  // null: serial
};

/// Scores groups by the attention that heads pay them: each head's softmax over the approximate
/// products of all candidates, with the exact ones of the keys that are attended anyway in its
/// denominator; summed in the group, joined over heads.
///
/// A sum of raw products over heads drowns the few heads that look for one place among the many
/// that look everywhere; a share of attention is at most 1 for each. It costs heads x rank products
/// a token where the sum costs rank. The summary is read once, and an exponential is taken once for
/// each head and token: groups' weights are kept relative to their chunk's largest logit, and made
/// shares when all chunks are through.
///
/// The same scores for any number of threads. Keeps scratch from call to call; not thread-safe.
class MassScorer {
 public:
  /// group_scores: [groups] out; -inf: never, else positive.
  void score(const MassArgs& args, int64_t group_tokens, float* group_scores);

  /// What it keeps for that many groups.
  static int64_t scratch_bytes(int64_t heads, int64_t groups, int64_t group_tokens);
  void clear() { scratch_ = {}; }

 private:
  struct Pieces;
  static Pieces pieces_of(int64_t heads, int64_t groups, int64_t group_tokens);

  std::vector<float> scratch_;
};

}  // namespace kvswap
