#pragma once

#include <cstdint>

#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

/// Stands where an exponent would: the page it belongs to holds elements of the model's dtype.
inline constexpr int8_t kNotFloat8 = -128;

struct RecordCodecArgs {
  RecordShape shape = {};             // of a record in the model's dtype
  DType dtype = DType::kFloat32;      // that one
  const void* const* from = nullptr;  // [count] records: of dtype to encode, of e4m3 to decode
  void* const* to = nullptr;          // [count]
  int8_t* exponents = nullptr;        // [count, kv_heads, 2]: of K, of V; encoding writes them
  int64_t count = 0;
};

/// Records in e4m3 (no infinities, largest 448), half the bytes or a quarter, in the same order of
/// elements: an element is its byte's value times 2^exponent, one power of two for the K of a KV
/// head and one for its V.
///
/// The exponent is the smallest with which the largest finite magnitude is at most 448, within
/// what lets dtype hold every decoded value exactly: -117..119, and -15..7 for float16. Rounds to
/// nearest, ties to even; finite values beyond 448 become 448, infinities and NaN become NaN. So
/// decoding is exact, and encoding what was decoded changes no value.
void encode_records(const RecordCodecArgs& args, const Execution& execution);
void decode_records(const RecordCodecArgs& args, const Execution& execution);

}  // namespace kvswap
