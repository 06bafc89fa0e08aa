#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/group_mass.h"
#include "methods/selection/selector.h"
#include "methods/summary/key_summary.h"

namespace kvswap {

/// One query over one sequence's summary.
struct MassArgs {
  const KeySummary* summary = nullptr;
  const float* query = nullptr;  // [heads, rank]: each head's own, times attention's scale
  const Candidates* candidates = nullptr;
  int64_t heads = 0;
  int64_t groups = 0;
  HeadJoin join = HeadJoin::kSum;
  const ParallelFor* parallel = nullptr;  // null: serial
};

/// Scores groups by the attention that heads pay them: each head's softmax over the approximate
/// products of the candidates, summed in the group, joined over heads. What is attended anyway has
/// no part in it: an approximate product is off by a constant for each query and head, which
/// cancels among candidates and would not beside exact products.
///
/// A sum of raw products over heads drowns the few heads that look for one place among the many
/// that look everywhere; a share of attention is at most 1 for each. It costs heads x rank products
/// a token where the sum costs rank. The summary is read once, and an exponential is taken once for
/// each head and token: groups' weights are kept relative to their chunk's largest exponent, and
/// made shares when all chunks are through. Queries meet int8 and int4 rows as int8 numbers.
///
/// The same scores for any number of threads. Keeps scratch from call to call; not thread-safe.
class MassScorer {
 public:
  /// group_scores: [groups] out; -inf: never, else positive.
  void score(const MassArgs& args, int64_t group_tokens, float* group_scores);

  /// What it keeps for that many groups.
  static int64_t scratch_bytes(int64_t heads, int64_t rank, int64_t groups, int64_t group_tokens);
  void clear();

 private:
  struct Pieces;
  static Pieces pieces_of(int64_t heads, int64_t groups, int64_t group_tokens);
  void prepare(const MassArgs& args);
  void weigh_piece(const MassArgs& args, int64_t piece, WeighGroupsArgs weigh) const;
  // int8_rows: the piece's, where rows are whole numbers; else null.
  bool weigh_int8(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                  const WeighGroupsArgs& weigh, const std::vector<int64_t>& others) const;
  void weigh_products(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                      WeighGroupsArgs weigh, const std::vector<int64_t>& others) const;
  void multiply(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                const WeighGroupsArgs& weigh, int64_t head, float* products) const;

  std::vector<float> scratch_;
  std::vector<float> factors_;      // [heads]: see WeighGroupsArgs
  std::vector<int8_t> int8_query_;  // [heads, int8_stride(rank)]: int8 and int4 rows only
};

}  // namespace kvswap
