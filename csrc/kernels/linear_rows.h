#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct LinearRowsArgs {
  const void* weight = nullptr;  // [outputs, inputs] contiguous
  const void* bias = nullptr;    // [outputs]; null: none
  const void* input = nullptr;   // [rows, inputs] contiguous
  void* output = nullptr;        // [rows, outputs]
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t rows = 0;
  DType dtype = DType::kFloat32;  // of all: fp32, bf16 or fp16
};

/// A linear layer, output = input weight^T + bias, for few rows: what takes the time is then to
/// fetch the weights, which torch's product does not do as fast as memory gives them in half
/// precision. Sums are fp32 and rounded once; the work is split over outputs. What a row becomes
/// depends neither on how that is done nor on the rows beside it.
void linear_rows(const LinearRowsArgs& args, const Execution& execution);

}  // namespace kvswap
