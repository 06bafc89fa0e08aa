#include "kernels/int4_rows.h"

#include <vector>

#include "kernels/cpu/element.h"

namespace kvswap {

void unpack_int4(const UnpackInt4Args& args) {
  const auto* packed = reinterpret_cast<const Int4Pair*>(args.packed);
  int8_t* rows = args.rows;
  for (int64_t block = 0; block < args.blocks; ++block) {
    for (int64_t column = 0; column < args.rank; column += 2) {
      for (int64_t t = 0; t < kSummaryBlock; ++t) rows[t] = low_half(packed[t]);
      if (column + 1 < args.rank) {
        for (int64_t t = 0; t < kSummaryBlock; ++t) rows[kSummaryBlock + t] = high_half(packed[t]);
      }
      packed += kSummaryBlock;
      rows += column + 1 < args.rank ? 2 * kSummaryBlock : kSummaryBlock;
    }
  }
}

const int8_t* as_int8_rows(DType dtype, const std::byte* rows, int64_t blocks, int64_t rank) {
  if (dtype == DType::kInt8) return reinterpret_cast<const int8_t*>(rows);
  if (dtype != DType::kInt4) return nullptr;
  thread_local std::vector<int8_t> unpacked;
  unpacked.resize(blocks * rank * kSummaryBlock);
  unpack_int4({.packed = rows, .rows = unpacked.data(), .blocks = blocks, .rank = rank});
  return unpacked.data();
}

}  // namespace kvswap
