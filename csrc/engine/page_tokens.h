#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/engine_options.h"

namespace kvswap {

/// A page of e4m3 in the model's dtype, [group_bytes()]; and one of these as e4m3. exponents:
/// [kv_heads, 2] of the page.
void decode_page(const EngineOptions& options, const std::byte* page, const int8_t* exponents,
                 std::byte* target);
void encode_page(const EngineOptions& options, const std::byte* page, std::byte* target,
                 int8_t* exponents);

/// A page's tokens in the model's dtype: the page, or what it is decoded to, [group_bytes()].
const std::byte* tokens_of_page(const EngineOptions& options, const std::byte* page,
                                const int8_t* exponents, std::byte* room);

/// One token of a page, in the model's dtype.
struct TokenPlace {
  std::byte* page = nullptr;
  int64_t slot = 0;
};
/// Token `slot` of a page becomes the one of another place.
void copy_token(const RecordShape& shape, const TokenPlace& target, const std::byte* page,
                int64_t slot);

}  // namespace kvswap
