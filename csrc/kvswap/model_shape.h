#pragma once

#include <cstdint>
#include <string>

namespace kvswap {

/// Of keys, values and queries.
enum class ElementType { kFloat32, kBFloat16, kFloat16 };

/// "float32", "bfloat16" or "float16".
const char* element_name(ElementType type);

/// The part of a model that is kept on disk.
struct ModelShape {
  int64_t layers = 0;  // on disk: the full-attention ones
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  ElementType dtype = ElementType::kFloat32;
  /// K and V; or 1: K alone, which is the values too, as in latent attention (MLA). What is then
  /// passed as values must be the keys.
  int64_t sides = 2;
  /// Of a KV head's V, at most head_dim; 0: as wide as K. Attention's output has as many.
  int64_t value_dim = 0;

  int64_t value_width() const { return value_dim == 0 ? head_dim : value_dim; }
  /// Elements of one token's K in one layer.
  int64_t width() const { return kv_heads * head_dim; }
  int64_t element_bytes() const { return dtype == ElementType::kFloat32 ? 4 : 2; }
  /// Bytes of K and V of `tokens` tokens in all layers, uncompressed.
  int64_t kv_bytes(int64_t tokens) const {
    const int64_t of_head = head_dim + (sides - 1) * value_width();
    return layers * kv_heads * of_head * element_bytes() * tokens;
  }
};

}  // namespace kvswap
