#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

/// How the heads' shares of attention become one score of a group.
enum class HeadJoin : int8_t { kSum, kMax };

struct WeighGroupsArgs {
  const float* logits = nullptr;  // [heads, logit_stride]; -inf or NaN: the token does not count
  float* weights = nullptr;       // [heads, ceil(tokens / group_tokens)] out
  float* largest = nullptr;       // [heads] out: the largest logit; -inf where no token counts
  float* sums = nullptr;          // [heads] out: of the weights
  int64_t logit_stride = 0;       // elements between two heads
  int64_t tokens = 0;
  int64_t group_tokens = 0;  // 1..64; the last group may be ragged
  int64_t heads = 0;
};

/// weights[h, g] = sum over the tokens of group g of exp(logit - largest[h]): one piece of each
/// head's softmax. The weight of a token that counts is positive, however far below the largest.
void weigh_groups(const WeighGroupsArgs& args);

struct MassFactorsArgs {
  const float* largest = nullptr;           // [pieces, heads] of weigh_groups()
  const float* sums = nullptr;              // [pieces, heads]
  const float* kept_log_sum_exp = nullptr;  // [heads]: of keys that are no candidates; null: none
  int64_t kept_stride = 1;                  // elements between two heads' kept_log_sum_exp
  float* factors = nullptr;                 // [pieces, heads] out
  int64_t pieces = 0;
  int64_t heads = 0;
};

/// What turns each piece's weights into shares of the head's whole softmax, kept keys included.
/// Pieces are added in rising order.
void mass_factors(const MassFactorsArgs& args);

struct JoinHeadsArgs {
  const float* weights = nullptr;  // [heads, groups]
  const float* factors = nullptr;  // [heads]
  float* group_scores = nullptr;   // [groups] out
  int64_t groups = 0;
  int64_t heads = 0;
  HeadJoin join = HeadJoin::kSum;
};

/// group_scores[g] = sum (or maximum) over heads of factors[h] * weights[h, g]; positive where a
/// token of the group counts, -inf where none does.
void join_heads(const JoinHeadsArgs& args);

struct GroupMassArgs {
  const float* logits = nullptr;            // [heads, tokens]; -inf or NaN: does not count
  const float* kept_log_sum_exp = nullptr;  // [heads]; null: every key is a candidate
  float* group_scores = nullptr;            // [ceil(tokens / group_tokens)] out
  int64_t tokens = 0;
  int64_t group_tokens = 0;
  int64_t heads = 0;
  HeadJoin join = HeadJoin::kSum;
};

/// The attention that heads pay to each group of one query: each head's softmax over all tokens and
/// what is kept, summed in the group, joined over heads. The three above in one, in one piece.
void group_mass(const GroupMassArgs& args);

}  // namespace kvswap
