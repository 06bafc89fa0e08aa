#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct Fp8Args {
  const void* source = nullptr;  // [rows, head_dim]: dtype when quantising, e4m3 bytes otherwise
  void* target = nullptr;        // [rows, head_dim]
  float* scales = nullptr;       // [rows]: one per token and head
  int64_t rows = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kFloat32;  // of the unquantised side
};

/// e4m3 (no infinities, largest 448), round to nearest even, scale = largest magnitude / 448 of the
/// row (1 for a row of zeros), NaN left out, which stays itself. ARKV's low-precision tier.
void fp8_quantize(const Fp8Args& args, const Execution& execution);
void fp8_dequantize(const Fp8Args& args, const Execution& execution);

}  // namespace kvswap
