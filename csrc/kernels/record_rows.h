#pragma once

#include "kernels/record_codec.h"

namespace kvswap {

/// As encode_records() and decode_records(), with an exponent for each token's row of K and of V:
/// exponents [count, kv_heads, 2, group_tokens]. No token changes what becomes of another.
void encode_record_rows(const RecordCodecArgs& args, const Execution& execution);
void decode_record_rows(const RecordCodecArgs& args, const Execution& execution);

}  // namespace kvswap
