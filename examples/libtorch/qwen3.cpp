#include "qwen3.h"

#include <kvswap/safetensors.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace {

using nlohmann::json;

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("--model: must have " + path + ", which is not there");
  try {
    return json::parse(file);
  } catch (const json::exception& error) {
    throw std::runtime_error("--model: " + path + " must be JSON: " + error.what());
  }
}

void require(bool holds, const std::string& must) {
  if (!holds) throw std::runtime_error("--model: must be a stock Qwen3, but " + must);
}

/// What this file does not compute must not be ignored.
void check_architecture(const json& config) {
  const std::string type = config.value("model_type", "unknown");
  require(type == "qwen3", "its model_type is " + type);
  require(config.value("hidden_act", "silu") == "silu", "its activation is not silu");
  require(!config.value("attention_bias", false), "its projections have a bias");
  require(!config.value("use_sliding_window", false), "it has sliding windows");
  const json rope = config.value("rope_parameters", json::object());
  require(rope.value("rope_type", "default") == "default", "its RoPE is scaled");
}

at::ScalarType scalar_type(const std::string& name) {
  if (name == "bfloat16" || name == "BF16") return at::kBFloat16;
  if (name == "float16" || name == "F16") return at::kHalf;
  if (name == "float32" || name == "F32") return at::kFloat;
  throw std::runtime_error("--model: its dtype must be bfloat16, float16 or float32, got " + name);
}

/// A weight, copied out of the file.
at::Tensor weight(const kvswap::SafetensorsFile& file, const std::string& name,
                  at::IntArrayRef shape, at::ScalarType dtype) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    throw std::runtime_error("--model: model.safetensors must have " + name);
  }
  const kvswap::StoredTensor& stored = found->second;
  if (at::IntArrayRef(stored.shape) != shape) {
    throw std::runtime_error("--model: " + name + " must have the shape that config.json says");
  }
  void* data = const_cast<std::byte*>(stored.bytes.data());
  return at::from_blob(data, shape, scalar_type(stored.dtype)).to(dtype, false, /*copy=*/true);
}

at::Tensor rotate(const at::Tensor& states, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = states.size(-1) / 2;
  const at::Tensor turned =
      at::cat({states.narrow(-1, half, half).neg(), states.narrow(-1, 0, half)}, -1);
  return states * cos.unsqueeze(1) + turned * sin.unsqueeze(1);
}

}  // namespace

Qwen3::Qwen3(const std::string& folder) {
  const json config = read_json(folder + "/config.json");
  check_architecture(config);
  type_ = config.at("model_type");
  dtype_ = scalar_type(config.value("dtype", "float32"));
  const int64_t hidden = config.at("hidden_size");
  const int64_t feed_forward = config.at("intermediate_size");
  const int64_t vocabulary = config.at("vocab_size");
  shape_.layers = config.at("num_hidden_layers");
  shape_.heads = config.at("num_attention_heads");
  shape_.kv_heads = config.at("num_key_value_heads");
  shape_.head_dim = config.value("head_dim", hidden / shape_.heads);
  shape_.dtype = dtype_ == at::kFloat      ? kvswap::ElementType::kFloat32
                 : dtype_ == at::kBFloat16 ? kvswap::ElementType::kBFloat16
                                           : kvswap::ElementType::kFloat16;
  norm_epsilon_ = config.at("rms_norm_eps");
  rope_theta_ = config.at("rope_parameters").at("rope_theta");
  json ends = config.value("eos_token_id", json());
  if (std::ifstream(folder + "/generation_config.json")) {
    ends = read_json(folder + "/generation_config.json").value("eos_token_id", ends);
  }
  if (ends.is_number()) ends = json::array({ends});
  for (const json& end : ends) end_tokens_.insert(end.get<int64_t>());

  const kvswap::SafetensorsFile file(folder + "/model.safetensors");
  const auto get = [&](const std::string& name, at::IntArrayRef shape) {
    return weight(file, name, shape, dtype_);
  };
  embedding_ = get("model.embed_tokens.weight", {vocabulary, hidden});
  const bool is_tied = config.value("tie_word_embeddings", false);
  head_ = is_tied ? embedding_ : get("lm_head.weight", {vocabulary, hidden});
  last_norm_ = get("model.norm.weight", {hidden});
  const int64_t query_width = shape_.heads * shape_.head_dim;
  for (int64_t i = 0; i < shape_.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const std::string self = layer + "self_attn.";
    layers_.push_back({.input_norm = get(layer + "input_layernorm.weight", {hidden}),
                       .post_norm = get(layer + "post_attention_layernorm.weight", {hidden}),
                       .query = get(self + "q_proj.weight", {query_width, hidden}),
                       .key = get(self + "k_proj.weight", {shape_.width(), hidden}),
                       .value = get(self + "v_proj.weight", {shape_.width(), hidden}),
                       .output = get(self + "o_proj.weight", {hidden, query_width}),
                       .query_norm = get(self + "q_norm.weight", {shape_.head_dim}),
                       .key_norm = get(self + "k_norm.weight", {shape_.head_dim}),
                       .gate = get(layer + "mlp.gate_proj.weight", {feed_forward, hidden}),
                       .up = get(layer + "mlp.up_proj.weight", {feed_forward, hidden}),
                       .down = get(layer + "mlp.down_proj.weight", {hidden, feed_forward})});
    predictors_.push_back(c10::make_intrusive<kvswap::QueryPredictor>(
        kvswap::QueryPredictorWeights{.projection = layers_.back().query,
                                      .bias = {},
                                      .norm = layers_.back().query_norm,
                                      .norm_epsilon = norm_epsilon_},
        kvswap::QueryPredictorShape{shape_.heads, shape_.kv_heads, shape_.head_dim},
        kvswap::QueryPredictor::Heads::kAll));
  }
}

at::Tensor Qwen3::norm(const at::Tensor& hidden, const at::Tensor& weight) const {
  const at::Tensor wide = hidden.to(at::kFloat);
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + norm_epsilon_)).to(hidden.scalar_type());
}

Qwen3::Rotation Qwen3::rotation(int64_t first_position, int64_t tokens) const {
  const int64_t dim = shape_.head_dim;
  const at::Tensor frequencies =
      1.0 / at::pow(at::Scalar(rope_theta_), at::arange(0, dim, 2, at::kFloat) / dim);
  const at::Tensor positions = at::arange(first_position, first_position + tokens, at::kLong);
  const at::Tensor angles = positions.unsqueeze(-1).to(at::kFloat) * frequencies;
  const at::Tensor both = at::cat({angles, angles}, -1).unsqueeze(0);
  return {both.cos().to(dtype_), both.sin().to(dtype_)};
}

at::Tensor Qwen3::attention(int64_t index, const at::Tensor& hidden, const Rotation& rotation,
                            kvswap::TensorCache& cache) const {
  const Layer& layer = layers_[index];
  const int64_t tokens = hidden.size(1);
  // The next layer's query is predicted from this layer's input, and its reads begin now.
  cache.look_ahead(index + 1, tokens, [&] {
    return predictors_[index + 1]->predict(hidden, rotation.cos, rotation.sin);
  });
  const auto heads = [&](const at::Tensor& weight) {
    return at::linear(hidden, weight).view({1, tokens, -1, shape_.head_dim});
  };
  const at::Tensor query = norm(heads(layer.query), layer.query_norm).transpose(1, 2);
  const at::Tensor key = norm(heads(layer.key), layer.key_norm).transpose(1, 2);
  const at::Tensor value = heads(layer.value).transpose(1, 2);
  const at::Tensor output = cache.extend(index, rotate(query, rotation.cos, rotation.sin),
                                         rotate(key, rotation.cos, rotation.sin), value,
                                         std::pow(static_cast<double>(shape_.head_dim), -0.5));
  return at::linear(output.reshape({1, tokens, -1}), layer.output);
}

at::Tensor Qwen3::forward(const std::vector<int64_t>& tokens, kvswap::TensorCache& cache) const {
  const at::InferenceMode inference;
  const auto count = static_cast<int64_t>(tokens.size());
  const at::Tensor ids = at::tensor(tokens, at::kLong).unsqueeze(0);
  const Rotation turned = rotation(cache.cache().held().positions, count);
  at::Tensor hidden = at::embedding(embedding_, ids);
  for (int64_t i = 0; i < shape_.layers; ++i) {
    const Layer& layer = layers_[i];
    hidden = hidden + attention(i, norm(hidden, layer.input_norm), turned, cache);
    const at::Tensor wide = norm(hidden, layer.post_norm);
    hidden =
        hidden +
        at::linear(at::silu(at::linear(wide, layer.gate)) * at::linear(wide, layer.up), layer.down);
  }
  const at::Tensor last = norm(hidden, last_norm_).narrow(1, count - 1, 1);
  return at::linear(last, head_).flatten().to(at::kFloat);
}
