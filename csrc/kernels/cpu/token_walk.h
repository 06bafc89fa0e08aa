#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/paged_attention.h"

namespace kvswap {

inline constexpr int64_t kBlockTokens = 64;   // tokens whose scores are taken together
inline constexpr int64_t kPartTokens = 2048;  // token slots in one task where pages are split
inline constexpr int64_t kTasksEnough = 16;   // batch x KV heads from which pages are not split
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// How the work is cut: it depends on the sizes alone, so the result does not depend on threads.
struct AttentionPartition {
  explicit AttentionPartition(const PagedAttentionArgs& args)
      : kv_heads(args.kv_heads()),
        rows(args.heads / kv_heads * args.queries) {
    if (args.batch * kv_heads >= kTasksEnough) return;
    pages_per_part = std::max<int64_t>(1, kPartTokens / args.shape.group_tokens);
    parts = std::max<int64_t>(1, (args.pages_max + pages_per_part - 1) / pages_per_part);
  }

  int64_t kv_heads;
  int64_t rows;  // query heads of one KV head x queries
  int64_t parts = 1;
  int64_t pages_per_part = std::numeric_limits<int64_t>::max();
};

/// What one task leaves behind when pages are split.
struct AttentionPartials {
  float* output = nullptr;       // [batch, kv_heads, parts, rows, head_dim]
  float* log_sum_exp = nullptr;  // [batch, kv_heads, parts, rows]
};

/// The valid tokens of a run of pages, handed out block by block.
struct TokenWalk {
  const PagedAttentionArgs& args;
  int64_t table;         // [batch, table_heads] row of the page table
  int64_t head_offset;   // bytes from a page's base to the head's K
  int64_t page;
  int64_t last_page;
  int64_t last_column;   // what the last query sees
  uint64_t mask = 0;     // tokens of the page before `page` that are still to come
  const char* keys[kBlockTokens] = {};
  int32_t columns[kBlockTokens] = {};

  /// Fills keys and columns; returns how many there are, 0 at the end.
  int64_t next() {
    const int64_t row_bytes = args.shape.head_dim * args.shape.element_bytes;
    const int64_t row = table * args.pages_max;
    int64_t found = 0;
    while (found < kBlockTokens) {
      if (!mask) {
        if (page == last_page) break;
        const uint64_t in_page = ~uint64_t{0} >> (64 - args.shape.group_tokens);
        mask = args.masks[row + page++] & in_page;
        continue;
      }
      const int64_t slot = std::countr_zero(mask);
      mask &= mask - 1;
      const int64_t column = args.columns[row + page - 1] + slot;
      if (column > last_column) continue;
      columns[found] = static_cast<int32_t>(column);
      keys[found++] = static_cast<const char*>(args.pages[row + page - 1]) + head_offset +
                      slot * row_bytes;
    }
    return found;
  }
};

}  // namespace kvswap
