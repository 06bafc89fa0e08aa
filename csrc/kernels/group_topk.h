#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct GroupMaxArgs {
  const float* scores = nullptr;  // [tokens]; NaN counts as inf
  float* group_scores = nullptr;  // [ceil(tokens / group_tokens)]
  int64_t tokens = 0;
  int64_t group_tokens = 0;  // 1..64; the last group may be ragged
};

/// ReduceMax within each group of consecutive tokens (KVSwap section 3.3). What is no number is
/// more than any: a group whose keys are none is to be chosen, so that it shows.
void group_max(const GroupMaxArgs& args);

struct TopKArgs {
  const float* scores = nullptr;  // [count]; NaN counts as -inf
  int32_t* indices = nullptr;     // [k] out: chosen indices in rising order
  int64_t count = 0;
  int64_t k = 0;
};

/// The indices of the k highest scores, in rising order; ties go to the lower index, so the choice
/// is the same on every back end. Scores of -inf are never chosen. Returns how many were written:
/// min(k, number of scores above -inf).
int64_t top_k(const TopKArgs& args);

}  // namespace kvswap
