#include "torch/head_blocks.h"

#include <vector>

namespace kvswap {
namespace {

/// Blocks [head_dim, columns] of each KV head as one matrix, its columns in turn.
ProjectionPair interleaved(const std::vector<at::Tensor>& blocks, int64_t rank) {
  const at::Tensor whole = at::block_diag(blocks);
  const auto heads = static_cast<int64_t>(blocks.size());
  const at::Tensor in_turn =
      at::arange(whole.size(1)).unflatten(0, {heads, blocks[0].size(1)}).t().flatten();
  const at::Tensor matrix =
      whole.index_select(1, in_turn.narrow(0, 0, rank).to(whole.device())).contiguous();
  return {matrix, matrix};
}

/// Eigenvectors of rows^T rows, the largest first: of few rows too, all of them.
at::Tensor directions_of(const at::Tensor& rows) {
  return std::get<1>(at::linalg_eigh(rows.t().matmul(rows))).flip(1);
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
    const at::Tensor sizes = asked.matmul(skew).abs().sum({0, 1});
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

}  // namespace kvswap
