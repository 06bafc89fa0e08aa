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
  const int64_t row = shape.head_dim * shape.element_bytes;
  const int64_t head = shape.head_elements() * shape.element_bytes;
  const std::byte* key = page + position * row;
  return {key, key + shape.value_elements() * shape.element_bytes, head, head};
}

void put_token(const RecordShape& shape, std::byte* page, int64_t position,
               const TokenBytes& token) {
  const int64_t row = shape.head_dim * shape.element_bytes;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    std::byte* target = page + head * shape.head_elements() * shape.element_bytes + position * row;
    std::memcpy(target, token.key + head * token.key_head_stride, row);
    if (shape.sides == 1) continue;
    target += shape.value_elements() * shape.element_bytes;
    std::memcpy(target, token.value + head * token.value_head_stride, row);
  }
}

}  // namespace kvswap
