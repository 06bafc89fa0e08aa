#include "torch/query_predictor.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rsqrt.h>
#include <torch/library.h>

#include <utility>

#include "torch/linear_rows.h"

namespace kvswap {
namespace {

void check_weights(const QueryPredictorWeights& weights, const QueryPredictorShape& shape) {
  TORCH_CHECK_VALUE(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
                    "QueryPredictor: heads must be a multiple of kv_heads, got ", shape.heads,
                    " and ", shape.kv_heads);
  const int64_t rows = shape.heads * shape.head_dim;
  TORCH_CHECK_VALUE(weights.projection.dim() == 2 && weights.projection.size(0) == rows,
                    "QueryPredictor: projection must be [", rows, ", hidden], got ",
                    weights.projection.sizes());
  TORCH_CHECK_VALUE(!weights.bias || weights.bias->numel() == rows,
                    "QueryPredictor: bias must have ", rows, " elements");
  TORCH_CHECK_VALUE(!weights.norm || weights.norm->numel() == shape.head_dim,
                    "QueryPredictor: norm must have head_dim elements, ", shape.head_dim);
}

/// [heads * head_dim, ...] -> [kv_heads * head_dim, ...], summed over each KV head's query heads.
at::Tensor sum_heads(const at::Tensor& tensor, const QueryPredictorShape& shape) {
  const int64_t group = shape.heads / shape.kv_heads;
  return tensor.detach()
      .to(at::kFloat)
      .reshape({shape.kv_heads, group, shape.head_dim, -1})
      .sum(1)
      .reshape({shape.kv_heads * shape.head_dim, -1})
      .to(tensor.scalar_type());
}

at::Tensor rms_norm(const at::Tensor& query, const at::Tensor& weight, double epsilon) {
  const at::Tensor wide = query.to(at::kFloat);
  const at::Tensor variance = wide.square().mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + epsilon)).to(query.scalar_type());
}

at::Tensor rotate(const at::Tensor& query, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t rotary = cos.size(-1);
  const at::Tensor turned = query.narrow(-1, 0, rotary);
  const at::Tensor half = at::cat(
      {turned.narrow(-1, rotary / 2, rotary / 2).neg(), turned.narrow(-1, 0, rotary / 2)}, -1);
  const at::Tensor result = turned * cos.unsqueeze(1) + half * sin.unsqueeze(1);
  if (rotary == query.size(-1)) return result;
  return at::cat({result, query.narrow(-1, rotary, query.size(-1) - rotary)}, -1);
}

}  // namespace

QueryPredictor::QueryPredictor(const QueryPredictorWeights& weights,
                               const QueryPredictorShape& shape, Heads heads)
    : weights_(weights), heads_out_(shape.heads), head_dim_(shape.head_dim) {
  check_weights(weights, shape);
  if (heads == Heads::kSummed) {
    TORCH_CHECK_VALUE(
        !weights.norm,
        "QueryPredictor: heads can only be summed without q_norm, which is not linear");
    weights_.projection = sum_heads(weights.projection, shape);
    if (weights.bias) weights_.bias = sum_heads(*weights.bias, shape).flatten();
    heads_out_ = shape.kv_heads;
  }
}

at::Tensor QueryPredictor::predict(const at::Tensor& hidden, const at::Tensor& cos,
                                   const at::Tensor& sin) const {
  TORCH_CHECK_VALUE(hidden.dim() == 3 && hidden.size(2) == weights_.projection.size(1),
                    "predict: hidden must be [batch, tokens, ", weights_.projection.size(1),
                    "], got ", hidden.sizes());
  TORCH_CHECK_VALUE(cos.dim() == 3 && cos.size(-1) <= head_dim_ && cos.sizes() == sin.sizes(),
                    "predict: cos and sin must be [batch or 1, tokens, at most ", head_dim_,
                    "], got ", cos.sizes(), " and ", sin.sizes());
  const at::NoGradGuard no_grad;
  at::Tensor query = project(hidden).view({hidden.size(0), hidden.size(1), heads_out_, head_dim_});
  if (weights_.norm) query = rms_norm(query, *weights_.norm, weights_.norm_epsilon);
  return rotate(query.transpose(1, 2), cos, sin);
}

/// at::linear(), [batch, tokens, rows]; few tokens in half precision by our own product.
at::Tensor QueryPredictor::project(const at::Tensor& hidden) const {
  const at::Tensor& matrix = weights_.projection;
  const auto& bias = weights_.bias;
  const at::ScalarType type = matrix.scalar_type();
  const bool is_half = type == at::kBFloat16 || type == at::kHalf;
  const bool is_plain = matrix.is_cpu() && matrix.is_contiguous() && hidden.is_cpu() &&
                        hidden.scalar_type() == type &&
                        (!bias || (bias->is_cpu() && bias->scalar_type() == type));
  const bool is_few = hidden.size(0) * hidden.size(1) < kFewRows;
  if (is_few && is_half && is_plain) return linear_rows_cpu(hidden, matrix, bias);
  return at::linear(hidden, matrix, bias);
}

TORCH_LIBRARY_FRAGMENT(kvswap_torch, library) {
  library.class_<QueryPredictor>("QueryPredictor")
      .def(torch::init([](at::Tensor projection, std::optional<at::Tensor> bias,
                          std::optional<at::Tensor> norm, double norm_epsilon, int64_t heads,
                          int64_t kv_heads, bool summed) {
        TORCH_CHECK_VALUE(heads >= 1 && projection.dim() == 2,
                          "QueryPredictor: projection must be [heads * head_dim, hidden] of at "
                          "least 1 head, got ",
                          projection.sizes(), " and ", heads);
        const QueryPredictorShape shape{
            .heads = heads, .kv_heads = kv_heads, .head_dim = projection.size(0) / heads};
        return c10::make_intrusive<QueryPredictor>(
            QueryPredictorWeights{.projection = std::move(projection),
                                  .bias = std::move(bias),
                                  .norm = std::move(norm),
                                  .norm_epsilon = norm_epsilon},
            shape, summed ? QueryPredictor::Heads::kSummed : QueryPredictor::Heads::kAll);
      }))
      .def("predict", &QueryPredictor::predict);
}

}  // namespace kvswap
