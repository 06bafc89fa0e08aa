#include "torch/head_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/block_diag.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <vector>

namespace kvswap {
namespace {

/// Blocks [head_dim, columns] of each KV head as one matrix, its columns, so many together, in
/// turn.
ProjectionPair interleaved(const std::vector<at::Tensor>& blocks, int64_t rank,
                           int64_t together = 1) {
  const at::Tensor whole = at::block_diag(blocks);
  const auto heads = static_cast<int64_t>(blocks.size());
  const at::Tensor in_turn =
      at::arange(whole.size(1)).unflatten(0, {heads, -1, together}).transpose(0, 1).flatten();
  const at::Tensor matrix =
      whole.index_select(1, in_turn.narrow(0, 0, rank).to(whole.device())).contiguous();
  return {matrix, matrix};
}

/// Eigenvectors of rows^T rows, the largest first: of few rows too, all of them.
at::Tensor directions_of(const at::Tensor& rows) {
  return std::get<1>(at::linalg_eigh(rows.t().matmul(rows))).flip(1);
}

/// [count / 2, 2]: channels from `first` on, i and i + count / 2.
at::Tensor halves(int64_t first, int64_t count) {
  return at::arange(first, first + count).unflatten(0, {2, -1}).t();
}

/// [kv_heads, pairs, 2, 2]: outer products of a pair's channels, summed over samples and the heads
/// that share a KV head. states: [samples, heads, head_dim]; pairs: [pairs, 2].
at::Tensor moments_of_pairs(const at::Tensor& states, const at::Tensor& pairs, int64_t kv_heads) {
  const at::Tensor of_pairs = states.to(at::kFloat)
                                  .index_select(2, pairs.flatten().to(states.device()))
                                  .unflatten(2, {-1, 2})
                                  .unflatten(1, {kv_heads, -1});
  return at::einsum("nhgpi,nhgpj->hpij", {of_pairs, of_pairs});
}

}  // namespace

ProjectionPair pca_per_head(const at::Tensor& keys, int64_t kv_heads, int64_t rank) {
  const at::Tensor rows = keys.to(at::kFloat);
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& own : (rows - rows.mean(0)).chunk(kv_heads, 1)) {
    blocks.push_back(directions_of(own));
  }
  return interleaved(blocks, rank);
}

ProjectionPair skewed(const at::Tensor& queries, int64_t kv_heads, int64_t rank) {
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& asked : queries.to(at::kFloat).chunk(kv_heads, 1)) {
    const at::Tensor skew = directions_of(asked.flatten(0, 1));
    const at::Tensor sizes = asked.matmul(skew).abs().sum(at::IntArrayRef({0, 1}));
    blocks.push_back(skew.index_select(1, sizes.argsort(0, true)));
  }
  return interleaved(blocks, rank);
}

ProjectionPair channels(const at::Tensor& keys, const std::optional<at::Tensor>& queries,
                        int64_t kv_heads, int64_t rank) {
  at::Tensor weights =
      at::linalg_vector_norm(keys.to(at::kFloat), 2, {0}).unflatten(0, {kv_heads, -1});
  if (queries) {
    const at::Tensor of_heads = queries->to(at::kFloat).unflatten(1, {kv_heads, -1});
    weights = weights * at::linalg_vector_norm(of_heads, 2, {0, 2});
  }
  const at::Tensor axes = at::eye(weights.size(1), weights.options());
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& order : weights.argsort(/*stable=*/true, 1, true).unbind(0)) {
    blocks.push_back(axes.index_select(1, order));
  }
  return interleaved(blocks, rank);
}

ProjectionPair rope_pairs(const at::Tensor& keys, const std::optional<at::Tensor>& queries,
                          int64_t kv_heads, const RopePairs& options) {
  const int64_t width = keys.size(1) / kv_heads;
  const at::Tensor pairs =
      at::cat({halves(0, options.rotary), halves(options.rotary, width - options.rotary)});
  const at::Tensor moments = moments_of_pairs(keys.unflatten(1, {kv_heads, -1}), pairs, kv_heads);
  // Squares of q_i k_i + q_j k_j, summed over both, are the sum of the moments' products.
  const at::Tensor energies =
      queries ? (moments * moments_of_pairs(*queries, pairs, kv_heads)).sum({2, 3})
              : moments.diagonal(0, 2, 3).sum(-1);
  const at::Tensor axes = at::eye(width, energies.options());
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& order : energies.argsort(/*stable=*/true, 1, true).unbind(0)) {
    const at::Tensor columns = pairs.to(order.device()).index_select(0, order).flatten();
    blocks.push_back(axes.index_select(1, columns));
  }
  return interleaved(blocks, options.rank, /*together=*/2);
}

}  // namespace kvswap
