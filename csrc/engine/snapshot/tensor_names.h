#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/records.h"
#include "kernels/types.h"

namespace kvswap {

/// As a saved session calls something of a layer.
inline std::string saved_name(int64_t layer, const char* what) {
  return "layers." + std::to_string(layer) + "." + what;
}

/// As safetensors calls an element type.
inline const char* saved_dtype(DType dtype) {
  return dtype == DType::kFloat32    ? "F32"
         : dtype == DType::kBFloat16 ? "BF16"
         : dtype == DType::kFloat16  ? "F16"
                                     : "I8";
}

/// Of `count` pages in the model's dtype. Where V is narrower than K a KV head's are one row.
inline std::vector<int64_t> saved_page_sizes(const RecordShape& page, int64_t count) {
  if (page.value_width() != page.head_dim) return {count, page.kv_heads, page.head_elements()};
  return {count, page.kv_heads, page.sides, page.group_tokens, page.head_dim};
}

/// Of the newest tokens of so many sequences, as many as `tail` has: K of all KV heads, then V.
inline std::vector<int64_t> saved_tail_sizes(const RecordShape& tail, int64_t sequences) {
  if (tail.value_width() != tail.head_dim) {
    return {sequences, tail.kv_heads * tail.head_elements()};
  }
  return {sequences, tail.sides, tail.kv_heads, tail.group_tokens, tail.head_dim};
}

/// A copy, since what is in a file may not be aligned.
template <typename T>
std::vector<T> copied(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

/// Of a file's checksums.
inline uint64_t random_seed() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace kvswap
