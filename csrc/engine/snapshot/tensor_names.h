#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

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
