#pragma once

#include <string>
#include <utility>

#include "torch/tensor_cache.h"

namespace kvswap {

/// How a projection is estimated, in the words of the settings.
struct EstimateOptions {
  std::string kind;           // query_aware or svd_keys
  std::string score = "sum";  // another one: each head counts for itself
  std::string heads = "all";  // each: a projection of every KV head's own keys
};

/// A projection from one chunk's own keys and queries, when nobody calibrated one: the C++ side of
/// kvswap_torch.projection.from_chunk, which says how and why.
///
/// from.rank: at most kv_heads * head_dim; with heads=each at most head_dim. Padding does not
/// weigh. Returns the key and the query matrix, [kv_heads * head_dim, rank] fp32.
std::pair<at::Tensor, at::Tensor> estimate_projection(const EstimateFrom& from,
                                                      const EstimateOptions& options);

}  // namespace kvswap
