#pragma once

#include "kernels/linear_rows.h"

namespace kvswap {

/// linear_rows() of bf16 by products of pairs, outputs begin..end - 1; only where has_bf16_pairs().
void linear_outputs_by_pairs(const LinearRowsArgs& args, int64_t begin, int64_t end);

}  // namespace kvswap
