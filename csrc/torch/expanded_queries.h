#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace kvswap {

/// Queries of a model with latent attention as the model makes them, and what expands latents to
/// keys and values of every head. A record's key is the latent with the rotated key behind it.
struct ExpandedQueries {
  at::Tensor query;   // [batch, heads, tokens, unrotated + rotary], the rotated part last
  at::Tensor weight;  // [heads, unrotated + value, rank]: what makes keys, then values
  int64_t unrotated = 0;
  /// Whether torch's flash attention attends, or our kernel; none: the faster one on this CPU.
  std::optional<bool> by_torch = {};

  int64_t heads() const { return weight.size(0); }
  int64_t rank() const { return weight.size(2); }
  int64_t value_dim() const { return weight.size(1) - unrotated; }
  int64_t rotary() const { return query.size(3) - unrotated; }
  /// The same over what a record holds, [batch, heads, tokens, rank + rotary].
  at::Tensor absorbed() const;
};

}  // namespace kvswap
