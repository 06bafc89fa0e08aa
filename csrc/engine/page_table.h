#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"

namespace kvswap {

/// For one step of one layer: the pages that attention reads, in rising group order.
struct Engine::PageTable {
  int64_t pages_max = 0;
  std::vector<const void*> pages;      // [batch, pages_max]
  std::vector<uint64_t> masks;         // [batch, pages_max]
  std::vector<int32_t> columns;        // [batch, pages_max]
  std::vector<int32_t> counts;         // [batch]
  std::vector<int32_t> query_columns;  // [batch]

  void resize(int64_t batch, int64_t pages) {
    pages_max = pages;
    this->pages.resize(batch * pages);
    masks.resize(batch * pages);
    columns.resize(batch * pages);
    counts.assign(batch, 0);
    query_columns.resize(batch);
  }
};

}  // namespace kvswap
