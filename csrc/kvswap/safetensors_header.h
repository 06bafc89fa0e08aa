#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvswap {

/// What the header of a safetensors file says of a tensor.
struct SafetensorsEntry {
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t offset_bytes = 0;  // in the file
  int64_t length_bytes = 0;
};

/// The header, checked against the file's size: tensors lie in it, cover it and share nothing.
struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::map<std::string, SafetensorsEntry> tensors;
};

inline constexpr int64_t kSafetensorsLengthBytes = 8;  // before the header

/// How long the header is, by the file's first 8 bytes. Throws ConfigError.
int64_t safetensors_header_bytes(std::span<const std::byte> first, int64_t file_bytes);

/// text: the header. Throws ConfigError with what is wrong, without the path.
SafetensorsHeader read_safetensors_header(std::string_view text, int64_t file_bytes);

/// Bits of an element; 0: it is no dtype of the format.
int64_t safetensors_bits(const std::string& dtype);

}  // namespace kvswap
