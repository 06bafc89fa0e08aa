#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvswap {

class FileBytes;

/// A tensor in a safetensors file.
struct StoredTensor {
  std::string dtype;  // as the format writes it: F32, BF16, F16, I64, ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, the file's; perhaps not aligned

  int64_t elements() const;
};

/// A safetensors file, read into memory: 8 bytes of header length, a header in JSON, then the
/// tensors' bytes. Everything the header says is checked against the file before it is believed.
///
/// Thread rules: const after construction, any thread.
class SafetensorsFile {
 public:
  /// Throws ConfigError with what is wrong, without the path: the caller says what the file is for.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// The whole file.
  std::span<const std::byte> bytes() const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }

 private:
  explicit SafetensorsFile(FileBytes&& file);

  std::unique_ptr<const FileBytes> file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, StoredTensor> tensors_;
};

/// Elements as fp32. Takes F32, F16, BF16 and F64; throws ConfigError for another dtype.
std::vector<float> as_floats(const StoredTensor& tensor);

}  // namespace kvswap
