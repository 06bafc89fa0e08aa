#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// How the heads' shares of attention become one score of a group.
enum class HeadJoin : int8_t { kSum, kMax };

struct WeighGroupsArgs {
  /// [heads, product_stride]; -inf: the token is no candidate; NaN: its key is no number.
  const float* products = nullptr;
  /// [heads], at least 0: what makes a product an exponent of 2, which is attention's scale times
  /// log2(e), and the scale of the head's query. NaN: none of the head's tokens is a candidate.
  const float* factors = nullptr;
  float* weights = nullptr;  // [heads, weight_stride] out
  float* largest = nullptr;  // [heads] out: the largest exponent; -inf where there is no candidate
  float* sums = nullptr;     // [heads] out: of the weights
  int64_t product_stride = 0;  // elements between two heads
  int64_t weight_stride = 0;   // at least ceil(tokens / group_tokens)
  int64_t tokens = 0;
  int64_t group_tokens = 0;  // 1..64; the last group may be ragged
  int64_t heads = 0;
  bool has_gaps = true;  // false: products are finite, and all tokens are candidates
};

/// weights[h, g] = sum over the candidates of group g of 2^(exponent - largest[h]): one piece of
/// each head's softmax. A candidate's weight is positive, however far it is below the largest. A
/// group with a key that is no number weighs inf; its other tokens count in the softmax as ever.
void weigh_groups(const WeighGroupsArgs& args);

struct MassSharesArgs {
  const float* largest = nullptr;  // [pieces, heads] of weigh_groups()
  const float* sums = nullptr;     // [pieces, heads]
  float* shares = nullptr;         // [pieces, heads] out
  int64_t pieces = 0;
  int64_t heads = 0;
};

/// What turns each piece's weights into shares of the head's whole softmax. Pieces are added in
/// rising order.
void mass_shares(const MassSharesArgs& args);

struct JoinHeadsArgs {
  const float* weights = nullptr;  // [heads, weight_stride]
  const float* shares = nullptr;   // [heads]
  float* group_scores = nullptr;   // [groups] out
  int64_t weight_stride = 0;       // at least groups
  int64_t groups = 0;
  int64_t heads = 0;
  HeadJoin join = HeadJoin::kSum;
};

/// group_scores[g] = sum (or maximum) over heads of shares[h] * weights[h, g]; positive where a
/// token of the group is a candidate, -inf where none is, inf where a weight is.
void join_heads(const JoinHeadsArgs& args);

struct GroupMassArgs {
  const float* logits = nullptr;  // [heads, tokens]; -inf: no candidate; NaN: its group's is inf
  float* group_scores = nullptr;  // [ceil(tokens / group_tokens)] out
  int64_t tokens = 0;
  int64_t group_tokens = 0;
  int64_t heads = 0;
  HeadJoin join = HeadJoin::kSum;
};

/// The attention that heads pay to each group of one query: each head's softmax over all
/// candidates, summed in the group, joined over heads. The three above in one, in one piece.
void group_mass(const GroupMassArgs& args);

}  // namespace kvswap
