#include "engine/page_tokens.h"

#include <cstring>

#include "kernels/record_codec.h"

namespace kvswap {

void decode_page(const EngineOptions& options, const std::byte* page, const int8_t* exponents,
                 std::byte* target) {
  const void* from = page;
  void* to = target;
  decode_records({.shape = options.record_shape(),
                  .dtype = options.dtype,
                  .from = &from,
                  .to = &to,
                  .exponents = const_cast<int8_t*>(exponents),
                  .count = 1},
                 {});
}

void encode_page(const EngineOptions& options, const std::byte* page, std::byte* target,
                 int8_t* exponents) {
  const void* from = page;
  void* to = target;
  encode_records({.shape = options.record_shape(),
                  .dtype = options.dtype,
                  .from = &from,
                  .to = &to,
                  .exponents = exponents,
                  .count = 1},
                 {});
}

const std::byte* tokens_of_page(const EngineOptions& options, const std::byte* page,
                                const int8_t* exponents, std::byte* room) {
  if (!options.has_float8_records() || *exponents == kNotFloat8) return page;
  decode_page(options, page, exponents, room);
  return room;
}

void copy_token(const RecordShape& shape, const TokenPlace& target, const std::byte* page,
                int64_t slot) {
  const int64_t row = shape.head_dim * shape.element_bytes;
  for (int64_t side = 0; side < 2 * shape.kv_heads; ++side) {  // K and V of a head
    std::memcpy(target.page + (side * shape.group_tokens + target.slot) * row,
                page + (side * shape.group_tokens + slot) * row, row);
  }
}

}  // namespace kvswap
