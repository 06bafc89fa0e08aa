#pragma once

#include <ATen/ATen.h>

#include "io/status.h"
#include "kernels/types.h"
#include "methods/selector.h"

namespace kvswap {

class Engine;

/// Raises what `status` says: c10::ValueError for a wrong call, SessionError otherwise.
void throw_if_error(const Status& status);

DType engine_dtype(at::ScalarType dtype);

/// [batch, heads, queries, head_dim] with a contiguous last dimension.
QueryView query_view(const at::Tensor& query);

struct ExactArgs {
  int64_t layer = 0;
  int64_t past = 0;   // columns before the chunk, appended; the chunk itself may be or not
  at::Tensor query;   // [batch, heads, tokens, head_dim]
  at::Tensor keys;    // [batch, kv_heads, tokens, head_dim]: of the chunk itself
  at::Tensor values;  // as keys
  double scale = 1;
  double softcap = 0;  // as PagedAttentionArgs
  at::Tensor sinks;    // [heads] fp32, or undefined
};

/// Exact attention of a long chunk over everything before it: the past streams through in blocks,
/// each with torch's own flash attention, merged by log-sum-exp in fp32. Scores that are capped
/// take plain torch instead.
///
/// Returns [batch, tokens, heads, head_dim]; rows of padding are 0.
at::Tensor attend_exactly(Engine& engine, const ExactArgs& args);

}  // namespace kvswap
