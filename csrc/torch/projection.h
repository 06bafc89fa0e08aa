#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace kvswap {

/// A projection from one chunk's own keys and queries, when nobody calibrated one: the C++ side of
/// kvswap_torch.projection.from_chunk, which says how and why.
///
/// kind: query_aware or svd_keys; keys: [batch, kv_heads, tokens, head_dim] after RoPE, all valid;
/// query: [batch, heads, tokens, head_dim] of the same tokens, or none; rank: at most kv_heads *
/// head_dim; score: sum, or another one, for which each head counts for itself; heads: each for a
/// projection of every KV head's own keys, then rank is at most head_dim. Returns the key and
/// the query matrix, [kv_heads * head_dim, rank] fp32.
std::pair<at::Tensor, at::Tensor> estimate_projection(
    const std::string& kind, const at::Tensor& keys, const std::optional<at::Tensor>& query,
    int64_t rank, const std::string& score = "sum", const std::string& heads = "all");

}  // namespace kvswap
