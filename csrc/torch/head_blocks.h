#pragma once

#include <cstdint>
#include <optional>

#include "torch/projection.h"

namespace kvswap {

// Projections of one block for each KV head: a head's columns meet its own keys and queries alone.
//
// keys: [samples, kv_heads * head_dim] after RoPE; queries: [samples, heads, head_dim]; `rank` is
// of all blocks together. Column j belongs to KV head j % kv_heads, so that the first r columns are
// a projection of rank r that treats all heads alike. With one KV head a block is the whole. With
// fewer KV heads than heads, the queries of all that share one count together. Both matrices of a
// pair are the same. With pairs of channels it is two columns that belong to a KV head in turn.

/// The directions in which a head's keys vary most (Loki 3).
ProjectionPair pca_per_head(const at::Tensor& keys, int64_t kv_heads, int64_t rank);

/// InfiniGen's skew (4.2, 4.3): a head's keys and queries are rotated by the right singular vectors
/// of its queries, which changes no product; kept are the columns that weigh most by their summed
/// size in the rotated queries, as the published code that fetches tokens has it (tests/oracles).
/// What it measures accuracy with adds those that are largest in the rotated keys, so that columns
/// are more than the ratio says.
ProjectionPair skewed(const at::Tensor& queries, int64_t kv_heads, int64_t rank);

/// The channels with the largest product of norms, of queries and of keys (ThinK 3.2); ties to the
/// lower one. queries: the newest; none: the keys' norms alone decide.
ProjectionPair channels(const at::Tensor& keys, const std::optional<at::Tensor>& queries,
                        int64_t kv_heads, int64_t rank);

/// How many columns, all of them even, and how many of a head's first channels are turned by
/// position: halves of these, so that i and i + rotary / 2 are a pair. Those that are not turned
/// are paired by halves too.
struct RopePairs {
  int64_t rank = 0;
  int64_t rotary = 0;
};

/// Both channels of those pairs that add most to products: by the sum of squares, over queries and
/// keys, of what a pair adds to q . k. Of single channels that is ThinK's rule. FASA scores by
/// pairs too, of a list that is found beforehand by a rule of its own; this one is ours. Ties go to
/// the lower pair. queries: the newest; none: the keys' squares alone decide.
ProjectionPair rope_pairs(const at::Tensor& keys, const std::optional<at::Tensor>& queries,
                          int64_t kv_heads, const RopePairs& options);

}  // namespace kvswap
