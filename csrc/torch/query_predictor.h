#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <optional>

namespace kvswap {

/// What a layer's queries are made with. Tensors are shared with the model, not copied.
struct QueryPredictorWeights {
  at::Tensor projection;           // [heads * head_dim, hidden]: W_q
  std::optional<at::Tensor> bias;  // [heads * head_dim]
  std::optional<at::Tensor> norm;  // [head_dim]: weight of q_norm (RMS norm per head)
  double norm_epsilon = 1e-6;
};

struct QueryPredictorShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
};

/// Predicts a layer's query from the layer before's normalised input (KVSwap section 3.3): this
/// layer's own W_q, q_norm and rotary embedding, for models of the Llama and Qwen families.
///
/// Groups are scored by a sum over heads, and rotation is linear; so without q_norm the W_q of each
/// KV head's query heads may be summed beforehand, for 1 / (heads / kv_heads) of the work and the
/// same scores. That needs memory for the sum.
///
/// Thread rules: const after construction, any thread.
class QueryPredictor : public torch::CustomClassHolder {
 public:
  enum class Heads { kAll, kSummed };

  QueryPredictor(const QueryPredictorWeights& weights, const QueryPredictorShape& shape,
                 Heads heads);

  /// hidden: [batch, tokens, hidden]; cos, sin: [batch or 1, tokens, rotary_dim] as transformers
  /// makes them (both halves alike), rotary_dim <= head_dim. Returns [batch, heads or kv_heads,
  /// tokens, head_dim], the kv_heads when summed.
  at::Tensor predict(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin) const;

 private:
  at::Tensor project(const at::Tensor& hidden) const;

  QueryPredictorWeights weights_;
  int64_t heads_out_;
  int64_t head_dim_;
};

}  // namespace kvswap
