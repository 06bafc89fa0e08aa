#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "torch/tensor_cache.h"

namespace kvswap {

/// The matrix of keys and that of queries, [kv_heads * head_dim, rank] fp32: k . q is close to
/// (k A_k) . (q A_q). Columns come in falling order of weight: the first r of a projection are the
/// projection of rank r.
using ProjectionPair = std::pair<at::Tensor, at::Tensor>;

/// How a projection is estimated, in the words of the settings.
struct EstimateOptions {
  std::string kind;
  std::string score = "sum";  // another one: each head counts for itself
  std::string heads = "all";  // each: a projection of every KV head's own keys
  int64_t rotary = 0;         // rope_pairs: how many of a head's first channels are turned; 0: all
};

/// A projection from one chunk's own keys and queries, when nobody calibrated one.
///
/// A bounded sample is looked at: keys evenly over the chunk; of the queries half evenly and half
/// the newest, which resemble most those to come. With too few queries the keys alone decide.
///
/// from.rank: at most kv_heads * head_dim; with heads=each at most head_dim; even of rope_pairs.
/// Padding does not weigh.
ProjectionPair estimate_projection(const EstimateFrom& from, const EstimateOptions& options);

/// What a kind of projection is where there are no queries, or too few, to make it from.
std::string kind_of_keys_alone(const std::string& kind);

/// Second moments, which can be gathered over any amount of text: mean outer products, [width,
/// width], of so many samples.
struct Moments {
  at::Tensor keys = {};
  at::Tensor queries = {};  // query_aware only
  int64_t key_count = 1;
  int64_t query_count = 1;
};

/// A projection of moments. svd_keys (KVSwap 3.2): the right singular vectors of the keys, both
/// matrices the same. query_aware: the best form of that rank of k . q itself. With L L^T = moment
/// + ridge for queries (Lq) and keys (Lk), where the ridge stands for directions that too few
/// samples did not show, and Lq^T Lk = U S V^T, the columns are A_k = Lq U S^-1/2 and A_q = Lk V
/// S^-1/2: no inverse of a moment is taken, so fewer samples than dimensions do no harm.
ProjectionPair pair_from_moments(const std::string& kind, const Moments& moments, int64_t rank);

/// Outer products of two queries, [tokens, heads, head_dim] each, summed over tokens: each head's
/// stands at its KV head's keys, [kv_heads * head_dim, kv_heads * head_dim].
at::Tensor head_moment(const at::Tensor& left, const at::Tensor& right, int64_t kv_heads);

/// The `rank` largest singular triplets of [rows, columns], by subspace iteration when they are
/// few: [rows, rank], [rank] falling, [columns, rank].
std::tuple<at::Tensor, at::Tensor, at::Tensor> leading_svd(const at::Tensor& matrix, int64_t rank);

}  // namespace kvswap
