#include "engine/sequence/token_codec.h"

#include <cstring>

#include "kernels/record_codec.h"

namespace kvswap {

void decode_page(const Plan& plan, const std::byte* page, const int8_t* exponents,
                 std::byte* target) {
  const void* from = page;
  void* to = target;
  decode_records({.shape = plan.record_shape,
                  .dtype = plan.options.dtype,
                  .from = &from,
                  .to = &to,
                  .exponents = const_cast<int8_t*>(exponents),
                  .count = 1},
                 {});
}

void encode_page(const Plan& plan, const std::byte* page, std::byte* target, int8_t* exponents) {
  const void* from = page;
  void* to = target;
  encode_records({.shape = plan.record_shape,
                  .dtype = plan.options.dtype,
                  .from = &from,
                  .to = &to,
                  .exponents = exponents,
                  .count = 1},
                 {});
}

const std::byte* tokens_of_page(const Plan& plan, const std::byte* page, const int8_t* exponents,
                                std::byte* room) {
  if (!plan.has_float8_records || *exponents == kNotFloat8) return page;
  decode_page(plan, page, exponents, room);
  return room;
}

TokenBytes token_of_page(const RecordShape& shape, const std::byte* page, int64_t position) {
  const int64_t head = shape.head_elements() * shape.element_bytes;
  const int64_t value = shape.value_elements() + position * shape.value_width();
  return {page + position * shape.head_dim * shape.element_bytes,
          page + value * shape.element_bytes, head, head};
}

void put_token(const RecordShape& shape, std::byte* page, int64_t position,
               const TokenBytes& token) {
  const int64_t key_row = shape.head_dim * shape.element_bytes;
  const int64_t value_row = shape.value_width() * shape.element_bytes;
  const int64_t value_bytes = shape.value_elements() * shape.element_bytes;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    std::byte* target = page + head * shape.head_elements() * shape.element_bytes;
    std::memcpy(target + position * key_row, token.key + head * token.key_head_stride, key_row);
    if (shape.sides == 1) continue;
    std::memcpy(target + value_bytes + position * value_row,
                token.value + head * token.value_head_stride, value_row);
  }
}

}  // namespace kvswap
