#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/plan.h"

namespace kvswap {

/// A page of e4m3 in the model's dtype, [group_bytes]; and one of these as e4m3. exponents:
/// [kv_heads, 2] of the page.
void decode_page(const Plan& plan, const std::byte* page, const int8_t* exponents,
                 std::byte* target);
void encode_page(const Plan& plan, const std::byte* page, std::byte* target, int8_t* exponents);

/// A page's tokens in the model's dtype: the page, or what it is decoded to, [group_bytes].
const std::byte* tokens_of_page(const Plan& plan, const std::byte* page, const int8_t* exponents,
                                std::byte* room);

/// K and V of one token in the model's dtype, wherever they stand: those of head h `head_stride`
/// bytes behind the first.
struct TokenBytes {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t key_head_stride = 0;
  int64_t value_head_stride = 0;
};
TokenBytes token_of_page(const RecordShape& shape, const std::byte* page, int64_t position);
/// The page's token at `position` becomes that one.
void put_token(const RecordShape& shape, std::byte* page, int64_t position,
               const TokenBytes& token);

}  // namespace kvswap
