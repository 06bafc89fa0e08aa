#include "kvswap/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/file_bytes.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"

namespace kvswap {
namespace {

constexpr uint64_t kHeaderBytesMax = 16 << 20;  // the format allows 100 MB; ours take kilobytes

#if KVSWAP_HAS_JSON

/// A list of numbers that are not negative.
bool read_numbers(const Json* value, std::vector<int64_t>& numbers) {
  if (!value || !value->is_array()) return false;
  for (const Json& item : *value) {
    // The parser gives what is not negative as unsigned.
    if (!item.is_number_unsigned() || item.get<uint64_t>() > INT64_MAX) return false;
    numbers.push_back(item.get<int64_t>());
  }
  return true;
}

/// data: of the tensors' bytes.
SafetensorsEntry read_entry(const std::string& name, const Json& entry,
                            const FileBytes::Range& data) {
  SafetensorsEntry tensor;
  const auto refuse = [&](const std::string& why) {
    throw ConfigError("tensor " + name + " " + why);
  };
  const Json* dtype = find_field(entry, "dtype");
  std::vector<int64_t> offsets;
  if (!dtype || !dtype->is_string() || !read_numbers(find_field(entry, "shape"), tensor.shape) ||
      !read_numbers(find_field(entry, "data_offsets"), offsets) || offsets.size() != 2) {
    refuse("must have dtype, shape and two data_offsets");
  }
  tensor.dtype = dtype->get<std::string>();
  const int64_t bits = safetensors_bits(tensor.dtype);
  if (bits == 0) refuse("has a dtype that is not known, " + tensor.dtype);
  int64_t bytes = bits / 8;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) refuse("is larger than any file");
  }
  const int64_t size = data.length_bytes;
  if (offsets[0] > offsets[1] || offsets[1] > size || offsets[1] - offsets[0] != bytes) {
    refuse("must lie in bytes 0.." + std::to_string(size) + " and be " + std::to_string(bytes) +
           " long, is at " + std::to_string(offsets[0]) + ".." + std::to_string(offsets[1]));
  }
  tensor.offset_bytes = data.offset_bytes + offsets[0];
  tensor.length_bytes = bytes;
  return tensor;
}

Json read_json(std::string_view text) {
  Json header;
  try {
    header = parse_json(text);
  } catch (const JsonError& error) {
    throw ConfigError(std::string("its header must be valid JSON: ") + error.what());
  }
  if (!header.is_object()) throw ConfigError("its header must be a JSON object");
  return header;
}

/// Tensors lie one after the other, from the first byte to the last.
void check_cover(const SafetensorsHeader& header, const FileBytes::Range& data) {
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const auto& [name, tensor] : header.tensors) {
    parts.emplace_back(tensor.offset_bytes, tensor.length_bytes);
  }
  std::ranges::sort(parts);
  int64_t end = data.offset_bytes;
  for (const auto& [begin, length] : parts) {
    if (begin != end) {
      throw ConfigError("its tensors must cover its bytes one after the other, and " +
                        std::string(begin < end ? "two share some" : "some are of none"));
    }
    end = begin + length;
  }
  if (end != data.offset_bytes + data.length_bytes) {
    throw ConfigError(
        "its tensors must cover its bytes one after the other, and the last are of none");
  }
}

#endif

}  // namespace

int64_t safetensors_bits(const std::string& dtype) {
  static const std::map<std::string, int64_t> bits = {
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"I16", 16},
      {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},    {"U32", 32},    {"F32", 32},
      {"F64", 64}, {"I64", 64}, {"U64", 64},  {"C64", 64},
  };
  const auto found = bits.find(dtype);
  return found == bits.end() ? 0 : found->second;
}

int64_t safetensors_header_bytes(std::span<const std::byte> first, int64_t file_bytes) {
  uint64_t length = 0;
  if (first.size() >= sizeof(length)) std::memcpy(&length, first.data(), sizeof(length));
  if (length < 2 || length > kHeaderBytesMax ||
      static_cast<int64_t>(length) > file_bytes - kSafetensorsLengthBytes) {
    throw ConfigError("its header must be 2 bytes or more and lie in the file, got " +
                      std::to_string(length) + " in " + std::to_string(file_bytes));
  }
  return static_cast<int64_t>(length);
}

#if KVSWAP_HAS_JSON

SafetensorsHeader read_safetensors_header(std::string_view text, int64_t file_bytes) {
  const int64_t begin = kSafetensorsLengthBytes + static_cast<int64_t>(text.size());
  const FileBytes::Range data = {begin, file_bytes - begin};
  const Json json = read_json(text);
  SafetensorsHeader header;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      for (const auto& [fact, value] : entry.items()) {
        if (!value.is_string()) throw ConfigError("its metadata must be strings");
        header.metadata[fact] = value.get<std::string>();
      }
    } else {
      header.tensors[name] = read_entry(name, entry, data);
    }
  }
  check_cover(header, data);
  return header;
}

#else

SafetensorsHeader read_safetensors_header(std::string_view, int64_t) {
  throw ConfigError("this kvswap_torch was built without nlohmann-json and cannot read its header");
}

#endif

}  // namespace kvswap
