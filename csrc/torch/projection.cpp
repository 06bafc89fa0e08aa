#include "torch/projection.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <tuple>
#include <vector>

namespace kvswap {
namespace {

// kvswap_torch/projection.py, number by number: test_libtorch_example.py compares what comes of it.
constexpr double kRidge = 1e-2;
constexpr int64_t kKeysMax = 2048;
constexpr int64_t kQueriesNewest = 512;
constexpr int64_t kQueriesMin = 8;
constexpr int kSvdPasses = 4;

using Pair = std::pair<at::Tensor, at::Tensor>;

/// The `rank` largest singular triplets, by subspace iteration when they are few.
std::tuple<at::Tensor, at::Tensor, at::Tensor> leading_svd(const at::Tensor& matrix, int64_t rank) {
  const int64_t width = rank + 16;
  if (3 * width >= std::min(matrix.size(0), matrix.size(1))) {
    const auto [left, weights, right] = at::linalg_svd(matrix, false);
    return {left.narrow(1, 0, rank), weights.narrow(0, 0, rank),
            right.narrow(0, 0, rank).t().contiguous()};
  }
  // A generator of its own: sampling elsewhere must not change with it.
  auto generator = at::detail::createCPUGenerator(0);
  at::Tensor basis =
      at::randn({matrix.size(1), width}, generator, matrix.options().device(at::kCPU))
          .to(matrix.device());
  for (int pass = 0; pass < kSvdPasses; ++pass) {
    basis = std::get<0>(at::linalg_qr(matrix.matmul(basis)));
    basis = std::get<0>(at::linalg_qr(matrix.t().matmul(basis)));
  }
  const auto [left, weights, right] = at::linalg_svd(matrix.matmul(basis), false);
  return {left.narrow(1, 0, rank), weights.narrow(0, 0, rank),
          basis.matmul(right.t()).narrow(1, 0, rank).contiguous()};
}

/// Lower triangular L with L L^T = moment + a ridge that fades with the samples' count.
at::Tensor factor(const at::Tensor& moment, int64_t count) {
  const int64_t width = moment.size(0);
  const at::Tensor wide = moment.to(at::kDouble);
  const at::Tensor mean = wide.diagonal().mean().clamp_min(1e-30);
  const at::Tensor ridge = kRidge * mean * width / (width + count - 1);
  return at::linalg_cholesky(wide + ridge * at::eye(width, wide.options())).to(at::kFloat);
}

Pair svd_keys(const at::Tensor& samples, int64_t rank) {
  const at::Tensor keys = samples.to(at::kFloat);
  const at::Tensor moment = keys.t().matmul(keys) / keys.size(0);
  const at::Tensor directions = std::get<0>(leading_svd(moment, rank)).contiguous();
  return {directions, directions};
}

/// Outer products of queries [tokens, heads, head_dim], each head's at its KV head's keys.
at::Tensor head_moment(const at::Tensor& queries, int64_t kv_heads) {
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& group : queries.unflatten(1, {kv_heads, -1}).unbind(1)) {
    const at::Tensor rows = group.flatten(0, 1);
    blocks.push_back(rows.t().matmul(rows));
  }
  return at::block_diag(blocks);
}

/// queries: [tokens, heads, head_dim] fp32.
Pair query_aware(const at::Tensor& key_samples, const at::Tensor& queries, int64_t kv_heads,
                 const std::string& score, int64_t rank) {
  at::Tensor keys = key_samples.to(at::kFloat);
  at::Tensor moment;
  if (score == "sum") {
    keys = keys - keys.mean(0);
    const at::Tensor summed = queries.unflatten(1, {kv_heads, -1}).sum(2).flatten(1);
    moment = summed.t().matmul(summed);
  } else {
    // Keys are not centred: a head's constant weighs all its groups against its sinks and tail.
    moment = head_moment(queries, kv_heads);
  }
  const at::Tensor key_factor = factor(keys.t().matmul(keys) / keys.size(0), keys.size(0));
  const at::Tensor query_factor = factor(moment / queries.size(0), queries.size(0));
  const auto [left, weights, right] = leading_svd(query_factor.t().matmul(key_factor), rank);
  const at::Tensor scale = at::maximum(weights, weights[0].clamp_min(1e-30) * 1e-7).rsqrt();
  return {query_factor.matmul(left) * scale, key_factor.matmul(right) * scale};
}

}  // namespace

namespace {

/// Every KV head for itself, one below the other.
Pair estimate_each(const EstimateFrom& from, const EstimateOptions& options) {
  const int64_t kv_heads = from.keys.size(1);
  EstimateOptions alone = options;
  alone.heads = "all";
  std::vector<at::Tensor> key_sides;
  std::vector<at::Tensor> query_sides;
  for (int64_t head = 0; head < kv_heads; ++head) {
    EstimateFrom own = from;
    own.keys = from.keys.narrow(1, head, 1);
    if (from.query) own.query = from.query->tensor_split(kv_heads, 1)[head];
    auto [key, other] = estimate_projection(own, alone);
    key_sides.push_back(key);
    query_sides.push_back(other);
  }
  return {at::cat(key_sides), at::cat(query_sides)};
}

/// [batch, heads, tokens, head_dim] at those tokens that are no padding: [samples, heads,
/// head_dim].
at::Tensor tokens_at(const at::Tensor& states, const at::Tensor& tokens,
                     const std::optional<at::Tensor>& valid) {
  const at::Tensor rows =
      states.index_select(2, tokens.to(states.device())).transpose(1, 2).flatten(0, 1);
  if (!valid) return rows;
  const at::Tensor counts = valid->index_select(1, tokens).flatten();
  return rows.index_select(0, counts.nonzero().flatten().to(states.device()));
}

}  // namespace

Pair estimate_projection(const EstimateFrom& from, const EstimateOptions& options) {
  if (options.heads == "each" && from.keys.size(1) > 1) return estimate_each(from, options);
  const int64_t batch = from.keys.size(0);
  const int64_t kv_heads = from.keys.size(1);
  const int64_t tokens = from.keys.size(2);
  const int64_t width = kv_heads * from.keys.size(3);
  TORCH_CHECK_VALUE(tokens >= 1 && from.rank >= 1 && from.rank <= width,
                    "estimate_projection: rank must be 1 to ", width, ", got ", from.rank);
  const int64_t per_sequence = std::max<int64_t>(1, kKeysMax / batch);
  const at::Tensor evenly =
      at::linspace(0, tokens - 1, std::min(tokens, per_sequence)).to(at::kLong);
  at::Tensor sample = tokens_at(from.keys, evenly, from.valid).flatten(1);
  if (sample.size(0) == 0) sample = tokens_at(from.keys, evenly, {}).flatten(1);
  if (options.kind == "svd_keys" || !from.query) return svd_keys(sample, from.rank);
  const int64_t newest_count = std::max<int64_t>(1, kQueriesNewest / batch);
  const at::Tensor newest = at::arange(std::max<int64_t>(0, tokens - newest_count), tokens);
  const int64_t step = std::max<int64_t>(1, evenly.size(0) / std::max<int64_t>(1, newest.size(0)));
  const at::Tensor looked_at = at::cat({evenly.slice(0, 0, evenly.size(0), step), newest});
  const at::Tensor queries = tokens_at(*from.query, looked_at, from.valid).to(at::kFloat);
  if (queries.size(0) < kQueriesMin) return svd_keys(sample, from.rank);
  return query_aware(sample, queries, kv_heads, options.score, from.rank);
}

}  // namespace kvswap
