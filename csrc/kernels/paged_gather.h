#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

struct PagedGatherArgs {
  const void* const* pages = nullptr;  // [batch, table_heads, pages_max]; null: zeros
  void* keys = nullptr;                // [batch, kv_heads(), pages_max * group_tokens, head_dim]
  void* values = nullptr;              // the same, rows of value_width()
  int64_t pages_max = 0;
  int64_t table_heads = 1;  // 1: one table for all KV heads; else one for each
  int64_t batch = 0;
  RecordShape shape = {};  // shape.kv_heads: heads in a page, all of them or one

  int64_t kv_heads() const { return std::max(shape.kv_heads, table_heads); }
};

/// Copies the tokens of page tables to contiguous K and V, in the order of the tables.
void paged_gather(const PagedGatherArgs& args, const Execution& execution);

}  // namespace kvswap
