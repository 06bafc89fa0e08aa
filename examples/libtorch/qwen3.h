#pragma once

#include <kvswap/model_shape.h>
#include <kvswap/torch/query_predictor.h>
#include <kvswap/torch/tensor_cache.h>

#include <set>
#include <string>
#include <vector>

/// A stock Qwen3 decoder on the CPU, one sequence, whose keys and values live in a TensorCache.
///
/// Its arithmetic is that of transformers' Qwen3ForCausalLM, step by step and in the same dtype, so
/// that greedy answers agree.
class Qwen3 {
 public:
  /// Reads config.json, generation_config.json and model.safetensors of a folder. Throws
  /// std::runtime_error for another architecture, and for what is missing.
  explicit Qwen3(const std::string& folder);

  const kvswap::ModelShape& shape() const { return shape_; }
  const std::string& type() const { return type_; }
  const std::set<int64_t>& end_tokens() const { return end_tokens_; }

  /// Runs `tokens` after what is in the cache, in a pass that has begun there; the logits of the
  /// last one, [vocabulary] fp32.
  at::Tensor forward(const std::vector<int64_t>& tokens, kvswap::TensorCache& cache) const;

 private:
  struct Layer {
    at::Tensor input_norm, post_norm;  // [hidden]
    at::Tensor query, key, value;      // [heads or kv_heads * head_dim, hidden]
    at::Tensor output;                 // [hidden, heads * head_dim]
    at::Tensor query_norm, key_norm;   // [head_dim]
    at::Tensor gate, up, down;         // [feed_forward, hidden]; down: [hidden, feed_forward]
  };
  struct Rotation {
    at::Tensor cos, sin;  // [1, tokens, head_dim]
  };

  at::Tensor norm(const at::Tensor& hidden, const at::Tensor& weight) const;
  Rotation rotation(int64_t first_position, int64_t tokens) const;
  at::Tensor attention(int64_t index, const at::Tensor& hidden, const Rotation& rotation,
                       kvswap::TensorCache& cache) const;

  kvswap::ModelShape shape_;
  std::string type_;
  std::set<int64_t> end_tokens_;
  at::ScalarType dtype_ = at::kBFloat16;
  double norm_epsilon_ = 1e-6;
  double rope_theta_ = 1e6;
  at::Tensor embedding_;  // [vocabulary, hidden]
  at::Tensor head_;       // [vocabulary, hidden]
  at::Tensor last_norm_;  // [hidden]
  std::vector<Layer> layers_;
  std::vector<c10::intrusive_ptr<kvswap::QueryPredictor>> predictors_;  // of each layer's query
};
