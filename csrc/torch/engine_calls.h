#pragma once

#include <ATen/ATen.h>

#include "io/status.h"
#include "kernels/types.h"
#include "select/selector.h"

namespace kvswap {

class Engine;

/// Raises what `status` says: c10::ValueError for a wrong call, SessionError otherwise.
void throw_if_error(const Status& status);

DType engine_dtype(at::ScalarType dtype);

/// [batch, heads, queries, head_dim] with a contiguous last dimension.
QueryView query_view(const at::Tensor& query);

/// Exact attention of a long chunk over everything before it: the past streams through in blocks,
/// each with torch's own flash attention, merged by log-sum-exp in fp32.
///
/// query [batch, heads, tokens, head_dim]; keys, values [batch, kv_heads, tokens, head_dim]: the
/// chunk itself, appended already. Returns [batch, tokens, heads, head_dim]; rows of padding are 0.
at::Tensor attend_exactly(Engine& engine, int64_t layer, const at::Tensor& query,
                          const at::Tensor& keys, const at::Tensor& values, double scale);

}  // namespace kvswap
