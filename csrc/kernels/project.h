#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace kvswap {

struct ProjectKeysArgs {
  const void* keys = nullptr;         // [kv_heads, tokens, head_dim] with strides below; dtype
  int64_t head_stride = 0;            // elements
  int64_t token_stride = 0;           // elements; head_dim is contiguous
  const float* projection = nullptr;  // [kv_heads * head_dim, rank]
  void* summary = nullptr;            // [blocks, rank, 16]: rows first_row.. are written; int4: see
                                      // UnpackInt4Args
  void* rest = nullptr;               // [blocks, rest_rank, 16]: columns rank - rest_rank..; null:
                                      // none, as always with int4. `summary` has the others
  float* token_scale = nullptr;       // [blocks, 16]: int8 and int4 summaries only
  int64_t first_row = 0;              // row (token) in the summary where the first token goes
  int64_t tokens = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rank = 0;
  int64_t rest_rank = 0;  // of the rank
  DType key_dtype = DType::kFloat32;
  DType summary_dtype = DType::kFloat32;
};

/// K_lr = flatten(K) A (KVSwap section 3.2), written into the blocked layout of a summary. An int8
/// row is scaled by its own largest magnitude / 127, an int4 one by it / 7. What is not finite is
/// NaN, of an int8 or int4 row its scale: any product with it is NaN.
void project_keys(const ProjectKeysArgs& args);

struct ProjectQueryArgs {
  const void* query = nullptr;  // [heads, head_dim] with head_stride; dtype
  int64_t head_stride = 0;
  const float* projection = nullptr;  // [kv_heads * head_dim, rank]
  float* projected = nullptr;         // [rank]
  int64_t heads = 0;
  int64_t kv_heads = 0;  // heads is a multiple of kv_heads
  int64_t head_dim = 0;
  int64_t rank = 0;
  DType dtype = DType::kFloat32;
};

/// q_lr = sum over heads of A_g(h)^T q_h (KVSwap section 3.3, eq. 1, summed over heads).
void project_query(const ProjectQueryArgs& args);

}  // namespace kvswap
