#include "kernels/int4_rows.h"

#include <cstring>
#include <vector>

namespace kvswap {

namespace {

/// The bytes of a column: vectors of every processor, by the compiler's own operators.
using Bytes [[gnu::vector_size(kSummaryBlock)]] = uint8_t;

Bytes load_bytes(const std::byte* source) {
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof(bytes));
  return bytes;
}

/// Numbers of four bits as ones of eight, with their sign.
void store_signed(Bytes halves, int8_t* target) {
  const Bytes numbers = (halves ^ 8) - 8;
  std::memcpy(target, &numbers, sizeof(numbers));
}

}  // namespace

void unpack_int4(const UnpackInt4Args& args) {
  const std::byte* packed = args.packed;
  int8_t* rows = args.rows;
  for (int64_t block = 0; block < args.blocks; ++block) {
    for (int64_t column = 0; column < args.rank; ++column, rows += kSummaryBlock) {
      const bool is_low = column % 2 == 0;
      const Bytes pairs = load_bytes(packed);
      store_signed(is_low ? pairs & 15 : pairs >> 4, rows);
      if (!is_low || column + 1 == args.rank) packed += kSummaryBlock;
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
