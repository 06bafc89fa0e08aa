#pragma once

#include <cstdint>

#include "methods/selection/selector.h"

namespace kvswap {

/// Keys of one group.
struct GroupKeys {
  KeyView keys;  // [kv_heads, tokens, head_dim]
  int64_t kv_heads = 0;
  int64_t tokens = 0;  // at most 64
  int64_t head_dim = 0;
  uint64_t valid = 0;  // bit i: token i counts
};

}  // namespace kvswap
