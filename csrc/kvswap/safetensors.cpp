#include "kvswap/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/anonymous_file.h"
#include "io/file_bytes.h"
#include "io/syscalls.h"
#include "kernels/cpu/element.h"
#include "kvswap/errors.h"
#include "kvswap/safetensors_header.h"

namespace kvswap {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

namespace {

[[noreturn]] void fail(int error_number, const std::string& path) {
  throw ConfigError(std::strerror(error_number) + std::string(": ") + path);
}

/// All of a regular file.
FileBytes bytes_of(const std::string& path) {
  // Not to wait for the writer of a pipe of that name.
  const OwnedFd file(syscalls().open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0));
  if (file.get() < 0) fail(-file.get(), path);
  struct stat facts{};
  const int known = syscalls().facts(file.get(), &facts);
  if (known < 0) fail(-known, path);
  if (S_ISDIR(facts.st_mode)) fail(EISDIR, path);
  if (!S_ISREG(facts.st_mode)) throw ConfigError("it is no regular file");
  if (facts.st_size == 0) throw ConfigError("it is empty");
  auto bytes = FileBytes::read(file.get(), {0, facts.st_size}, path);
  if (bytes.is_ok()) return std::move(bytes.value());
  throw ConfigError(bytes.status().message());
}

template <typename Stored, typename Convert>
std::vector<float> converted(const StoredTensor& tensor, const Convert& convert) {
  std::vector<float> floats(tensor.elements());
  for (size_t i = 0; i < floats.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, tensor.bytes.data() + i * sizeof(Stored), sizeof(Stored));
    floats[i] = convert(stored);
  }
  return floats;
}

}  // namespace

int64_t StoredTensor::elements() const {
  return static_cast<int64_t>(bytes.size()) * 8 / safetensors_bits(dtype);
}

SafetensorsFile::SafetensorsFile(const std::string& path) : SafetensorsFile(bytes_of(path)) {}

SafetensorsFile::SafetensorsFile(FileBytes&& file)
    : file_(std::make_unique<const FileBytes>(std::move(file))) {
  const std::span<const std::byte> bytes = file_->bytes();
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t length = safetensors_header_bytes(bytes.first(std::min(bytes.size(), 8ul)), size);
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kSafetensorsLengthBytes;
  SafetensorsHeader header = read_safetensors_header({text, static_cast<size_t>(length)}, size);
  metadata_ = std::move(header.metadata);
  for (auto& [name, entry] : header.tensors) {
    tensors_[name] = {std::move(entry.dtype), std::move(entry.shape),
                      bytes.subspan(entry.offset_bytes, entry.length_bytes)};
  }
}

SafetensorsFile::~SafetensorsFile() = default;

std::span<const std::byte> SafetensorsFile::bytes() const { return file_->bytes(); }

std::vector<float> as_floats(const StoredTensor& tensor) {
  if (tensor.dtype == "F32") {
    return converted<float>(tensor, [](float value) { return value; });
  }
  if (tensor.dtype == "F64") {
    return converted<double>(tensor, [](double value) { return static_cast<float>(value); });
  }
  if (tensor.dtype == "F16") {
    return converted<Float16>(tensor, [](Float16 value) { return to_float(value); });
  }
  if (tensor.dtype == "BF16") {
    return converted<BFloat16>(tensor, [](BFloat16 value) { return to_float(value); });
  }
  throw ConfigError("a tensor of floats must be F32, F16, BF16 or F64, got " + tensor.dtype);
}

}  // namespace kvswap
