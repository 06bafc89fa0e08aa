#include "torch/projection.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/block_diag.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_cholesky.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "torch/head_blocks.h"

namespace kvswap {
namespace {

constexpr double kRidge = 1e-2;  // of the mean variance, added to one sample's moment; else less
constexpr int64_t kKeysMax = 2048;
constexpr int64_t kQueriesNewest = 512;
constexpr int64_t kQueriesMin = 8;
constexpr int64_t kWindow = 32;    // newest queries that choose channels (ThinK 4.1), or pairs
constexpr double kLargest = 1e15;  // whose squares' sums are finite in fp32
constexpr int kSvdPasses = 4;      // the spectrum of keys falls fast

/// Lower triangular L with L L^T = moment + a ridge that fades with the samples' count.
at::Tensor factor(const at::Tensor& moment, int64_t count) {
  const int64_t width = moment.size(0);
  const at::Tensor wide = moment.to(at::kDouble);
  const at::Tensor mean = wide.diagonal().mean().clamp_min(1e-30);
  const at::Tensor ridge = kRidge * mean * width / (width + count - 1);
  return at::linalg_cholesky(wide + ridge * at::eye(width, wide.options())).to(at::kFloat);
}

/// samples: [count, width] fp32; their mean outer product.
at::Tensor moment_of(const at::Tensor& samples) {
  return samples.t().matmul(samples) / samples.size(0);
}

/// keys: [samples, width]; queries: [samples, heads, head_dim] fp32.
ProjectionPair query_aware(const at::Tensor& keys, const at::Tensor& queries, int64_t kv_heads,
                           const EstimateFrom& from, const std::string& score) {
  at::Tensor rows = keys.to(at::kFloat);
  Moments moments = {.key_count = keys.size(0), .query_count = queries.size(0)};
  if (score == "sum") {
    rows = rows - rows.mean(0);
    moments.queries = moment_of(queries.unflatten(1, {kv_heads, -1}).sum(2).flatten(1));
  } else {
    // Keys are not centred, though a head's constant cancels among candidates: it was measured to
    // do no good.
    moments.queries = head_moment(queries, queries, kv_heads) / queries.size(0);
  }
  moments.keys = moment_of(rows);
  return pair_from_moments("query_aware", moments, from.rank);
}

ProjectionPair of_keys(const std::string& kind, const at::Tensor& keys, int64_t kv_heads,
                       int64_t rank) {
  if (kind == "pca_per_head") return pca_per_head(keys, kv_heads, rank);
  return pair_from_moments("svd_keys", {.keys = moment_of(keys.to(at::kFloat))}, rank);
}

/// Every KV head for itself, one below the other.
ProjectionPair estimate_each(const EstimateFrom& from, const EstimateOptions& options) {
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

/// What the states are to be divided by, so that sums of their squares neither overflow nor vanish;
/// 1 as a rule.
double scale_of(const char* name, const at::Tensor& states) {
  const auto largest = states.abs().max().item<double>();
  TORCH_CHECK_VALUE(std::isfinite(largest), "estimate_projection: ", name, " must be finite, got ",
                    largest);
  const bool is_usual = largest == 0 || (largest <= kLargest && largest >= 1 / kLargest);
  return is_usual ? 1.0 : std::exp2(std::ceil(std::log2(largest)));
}

at::Tensor newest_of(const EstimateFrom& from, int64_t count) {
  const int64_t tokens = from.keys.size(2);
  return at::arange(std::max<int64_t>(0, tokens - count), tokens);
}

RopePairs pairs_wanted(const EstimateFrom& from, const EstimateOptions& options) {
  const int64_t width = from.keys.size(3);
  const int64_t rotary = options.rotary == 0 ? width : options.rotary;
  TORCH_CHECK_VALUE(from.rank % 2 == 0 && width % 2 == 0,
                    "estimate_projection: rank must be even, since rope_pairs takes both channels "
                    "of a pair, got ",
                    from.rank);
  TORCH_CHECK_VALUE(rotary % 2 == 0 && rotary >= 2 && rotary <= width,
                    "estimate_projection: rotary must be even and 2 to ", width, ", got ", rotary);
  return {.rank = from.rank, .rotary = rotary};
}

}  // namespace

std::string kind_of_keys_alone(const std::string& kind) {
  return kind == "query_aware" ? "svd_keys" : kind == "skewed" ? "pca_per_head" : kind;
}

at::Tensor head_moment(const at::Tensor& left, const at::Tensor& right, int64_t kv_heads) {
  const std::vector<at::Tensor> ones = left.unflatten(1, {kv_heads, -1}).unbind(1);
  const std::vector<at::Tensor> others = right.unflatten(1, {kv_heads, -1}).unbind(1);
  std::vector<at::Tensor> blocks;
  for (size_t head = 0; head < ones.size(); ++head) {
    blocks.push_back(ones[head].flatten(0, 1).t().matmul(others[head].flatten(0, 1)));
  }
  return at::block_diag(blocks);
}

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

ProjectionPair pair_from_moments(const std::string& kind, const Moments& moments, int64_t rank) {
  if (kind == "svd_keys") {
    // The moment's singular vectors are the keys' right ones.
    const at::Tensor directions = std::get<0>(leading_svd(moments.keys, rank)).contiguous();
    return {directions, directions};
  }
  const at::Tensor key_factor = factor(moments.keys, moments.key_count);
  const at::Tensor query_factor = factor(moments.queries, moments.query_count);
  const auto [left, weights, right] = leading_svd(query_factor.t().matmul(key_factor), rank);
  const at::Tensor scale = at::maximum(weights, weights[0].clamp_min(1e-30) * 1e-7).rsqrt();
  return {query_factor.matmul(left) * scale, key_factor.matmul(right) * scale};
}

ProjectionPair estimate_projection(const EstimateFrom& from, const EstimateOptions& options) {
  if (options.heads == "each" && from.keys.size(1) > 1) return estimate_each(from, options);
  const int64_t batch = from.keys.size(0);
  const int64_t kv_heads = from.keys.size(1);
  const int64_t tokens = from.keys.size(2);
  const int64_t width = kv_heads * from.keys.size(3);
  TORCH_CHECK_VALUE(batch >= 1, "estimate_projection: keys must be of a batch, got ",
                    from.keys.sizes());
  TORCH_CHECK_VALUE(tokens >= 1 && from.rank >= 1 && from.rank <= width,
                    "estimate_projection: rank must be 1 to ", width, ", got ", from.rank);
  const int64_t per_sequence = std::max<int64_t>(1, kKeysMax / batch);
  const at::Tensor evenly =
      at::linspace(0, tokens - 1, std::min(tokens, per_sequence)).to(at::kLong);
  at::Tensor keys = tokens_at(from.keys, evenly, from.valid).flatten(1);
  if (keys.size(0) == 0) keys = tokens_at(from.keys, evenly, {}).flatten(1);
  const double key_scale = scale_of("keys", keys);
  if (key_scale != 1) keys = keys.to(at::kFloat) / key_scale;
  if (options.kind == "channels" || options.kind == "rope_pairs") {
    std::optional<at::Tensor> window;
    if (from.query) window = tokens_at(*from.query, newest_of(from, kWindow), from.valid);
    if (options.kind == "channels") return channels(keys, window, kv_heads, from.rank);
    return rope_pairs(keys, window, kv_heads, pairs_wanted(from, options));
  }
  const std::string alone = kind_of_keys_alone(options.kind);
  if (alone == options.kind || !from.query) return of_keys(alone, keys, kv_heads, from.rank);
  const at::Tensor newest = newest_of(from, std::max<int64_t>(1, kQueriesNewest / batch));
  const int64_t step = std::max<int64_t>(1, evenly.size(0) / std::max<int64_t>(1, newest.size(0)));
  const at::Tensor looked_at = at::cat({evenly.slice(0, 0, evenly.size(0), step), newest});
  at::Tensor queries = tokens_at(*from.query, looked_at, from.valid).to(at::kFloat);
  if (queries.size(0) < kQueriesMin) return of_keys(alone, keys, kv_heads, from.rank);
  const double query_scale = scale_of("queries", queries);
  if (query_scale != 1) queries = queries / query_scale;
  if (options.kind == "skewed") return skewed(queries, kv_heads, from.rank);
  ProjectionPair pair = query_aware(keys, queries, kv_heads, from, options.score);
  const double ratio = std::sqrt(query_scale / key_scale);
  if (ratio != 1) pair = {pair.first * ratio, pair.second / ratio};
  return pair;
}

}  // namespace kvswap
