#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct MatrixVectorArgs {
  const void* matrix = nullptr;  // [rows, columns] contiguous
  const void* vector = nullptr;  // [columns]
  const void* bias = nullptr;    // [rows]; null: none
  void* output = nullptr;        // [rows]
  int64_t rows = 0;
  int64_t columns = 0;
  DType dtype = DType::kFloat32;  // of all
};

/// output = matrix vector + bias, sums in fp32: as fast as the matrix comes from memory, which
/// torch's product is not in bf16. Work is split over rows; the result does not depend on how.
void matrix_vector(const MatrixVectorArgs& args, const Execution& execution);

}  // namespace kvswap
