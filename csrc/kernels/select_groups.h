#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct SelectGroupsArgs {
  const void* summary = nullptr;       // [blocks, rank, 16], blocks of all sequences' tokens; dtype
  const float* token_scale = nullptr;  // [blocks, 16]: int8 only, else null
  const float* query = nullptr;        // [rank]
  float* group_scores = nullptr;       // [ceil(last_token / group_tokens)] out, also scratch
  int32_t* indices = nullptr;          // [k] out: chosen groups in rising order
  int64_t first_token = 0;             // tokens outside [first_token, last_token) do not count
  int64_t last_token = 0;              // at most blocks * 16
  int64_t rank = 0;
  int64_t group_tokens = 0;  // 1..64
  int64_t k = 0;
  DType dtype = DType::kFloat32;
};

/// low_rank_score, group_max and top_k of one sequence in one pass over its summary (KVSwap
/// section 3.3): scores never leave the first cache. Returns how many groups were chosen; a group
/// without a counting token is never chosen.
int64_t select_groups(const SelectGroupsArgs& args, const Execution& execution);

}  // namespace kvswap
