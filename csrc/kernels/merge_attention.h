#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct MergeAttentionArgs {
  void* output = nullptr;                    // [rows, head_dim] in and out
  float* log_sum_exp = nullptr;              // [rows] in and out
  const void* other_output = nullptr;        // [rows, head_dim]
  const float* other_log_sum_exp = nullptr;  // [rows]
  int64_t rows = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kFloat32;        // of output
  DType other_dtype = DType::kFloat32;  // the same; on the CPU any floating one where dtype is fp32
};

/// Merges two attentions over disjoint keys by their log-sum-exp, in place. A side of -inf counts
/// for nothing; two sides of -inf give zeros and -inf.
void merge_attention(const MergeAttentionArgs& args, const Execution& execution);

}  // namespace kvswap
