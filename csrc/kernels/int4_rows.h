#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/low_rank_score.h"
#include "kernels/types.h"

namespace kvswap {

/// The largest level of an int4 row; its scale is the row's largest magnitude divided by it.
inline constexpr float kInt4Levels = 7.0f;

struct UnpackInt4Args {
  /// [blocks, ceil(rank / 2), 16]: the low half of a byte is column 2 c of a token, the high one
  /// column 2 c + 1, or 0 where there is none.
  const std::byte* packed = nullptr;
  int8_t* rows = nullptr;  // [blocks, rank, 16] out: -8..7
  int64_t blocks = 0;
  int64_t rank = 0;
};

/// An int4 summary as the int8 one that scores the same with the same scales.
void unpack_int4(const UnpackInt4Args& args);

/// Blocks of an int8 summary as they stand, or of an int4 one in scratch of the calling thread,
/// which its next call takes again. Null for other types.
const int8_t* as_int8_rows(DType dtype, const std::byte* rows, int64_t blocks, int64_t rank);

}  // namespace kvswap
