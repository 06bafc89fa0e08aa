#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/paged_attention.h"

namespace kvswap {

inline constexpr int64_t kBlockTokens = 64;   // tokens whose scores are taken together
inline constexpr int64_t kPartTokens = 2048;  // token slots in one part where pages are split
inline constexpr int64_t kUnitsEnough = 16;   // batch x KV heads from which pages are not split

/// How the work is cut into units, ((sequence * parts) + part) * kv_heads + KV head. Parts depend
/// on the sizes alone, so that the result does not depend on the number of threads.
struct AttentionPartition {
  explicit AttentionPartition(const PagedAttentionArgs& args)
      : kv_heads(args.kv_heads()), rows(args.heads / kv_heads * args.queries) {
    if (args.batch * kv_heads < kUnitsEnough) {
      pages_per_part = std::max<int64_t>(1, kPartTokens / args.shape.group_tokens);
      parts = std::max<int64_t>(1, (args.pages_max + pages_per_part - 1) / pages_per_part);
    }
    units = args.batch * parts * kv_heads;
  }

  int64_t kv_heads;
  int64_t rows;  // query heads of one KV head x queries
  int64_t parts = 1;
  int64_t pages_per_part = std::numeric_limits<int32_t>::max();
  int64_t units = 0;
};

/// What the units leave behind when pages are split.
struct AttentionPartials {
  float* output = nullptr;       // [units, rows, value_width]
  float* log_sum_exp = nullptr;  // [units, rows]
};

/// Valid tokens of a page table, all of one format, for all heads of their pages.
struct TokenBlock {
  int64_t count = 0;
  bool is_float8 = false;
  const char* slots[kBlockTokens] = {};        // page base + token * bytes of a row of K
  const char* value_slots[kBlockTokens] = {};  // the same of V
  int32_t positions[kBlockTokens] = {};
  int32_t places[kBlockTokens] = {};  // in the table: page * group_tokens + token
  const int8_t* exponents[kBlockTokens] =
      {};  // of the token's page, [kv_heads, 2]; where is_float8
};

/// Hands out the valid tokens of a run of pages, block by block.
class TokenWalk {
 public:
  /// `table` is a row of the page table; tokens after `last_position` are not seen by any query.
  TokenWalk(const PagedAttentionArgs& args, int64_t table, int64_t first_page, int64_t pages_max,
            int64_t last_position)
      : args_(args),
        row_(table * args.pages_max),
        page_(std::min<int64_t>(first_page, args.page_counts[table])),
        last_page_(std::min<int64_t>(page_ + pages_max, args.page_counts[table])),
        last_position_(last_position) {}

  /// count == 0: that was all.
  void next(TokenBlock& block) {
    block.count = 0;
    while (block.count < kBlockTokens) {
      if (!mask_) {
        if (page_ == last_page_) break;
        const uint64_t in_page = ~uint64_t{0} >> (64 - args_.shape.group_tokens);
        mask_ = args_.masks[row_ + page_++] & in_page;
        continue;
      }
      const int8_t* exponents = exponents_of(row_ + page_ - 1);
      const bool is_float8 = exponents != nullptr;
      if (block.count > 0 && is_float8 != block.is_float8) break;
      const int64_t token = std::countr_zero(mask_);
      mask_ &= mask_ - 1;
      const int64_t position = args_.positions[row_ + page_ - 1] + token;
      if (position > last_position_) continue;
      const char* base = static_cast<const char*>(args_.pages[row_ + page_ - 1]);
      block.is_float8 = is_float8;
      const int64_t bytes = is_float8 ? 1 : args_.shape.element_bytes;
      block.slots[block.count] = base + token * args_.shape.head_dim * bytes;
      block.value_slots[block.count] = base + token * args_.shape.value_width() * bytes;
      block.exponents[block.count] = exponents;
      block.places[block.count] =
          static_cast<int32_t>((page_ - 1) * args_.shape.group_tokens + token);
      block.positions[block.count++] = static_cast<int32_t>(position);
    }
  }

 private:
  /// Null: the page is of the model's dtype.
  const int8_t* exponents_of(int64_t entry) const {
    if (args_.exponents == nullptr) return nullptr;
    const int8_t* exponents = args_.exponents + entry * args_.shape.kv_heads * 2;
    return *exponents == kNotFloat8 ? nullptr : exponents;
  }

  const PagedAttentionArgs& args_;
  int64_t row_;
  int64_t page_;
  int64_t last_page_;
  int64_t last_position_;
  uint64_t mask_ = 0;  // tokens of the page before page_ that are still to come
};

}  // namespace kvswap
