#pragma once

#include <string>

#include "io/saved_tensor.h"
#include "kvswap/safetensors.h"

namespace kvswap {

/// Begins the name of what a program keeps beside the session's own tensors.
inline constexpr const char* kKeptPrefix = "kept.";

/// A session's tensors in a safetensors file.
class SavedState final : public SavedTensors {
 public:
  /// path: of the file, or of a descriptor in /proc; name: in messages. Throws SessionError
  /// (kCorrupt).
  SavedState(const std::string& path, std::string name);

  bool has(const std::string& name) const override;
  Result<std::span<const std::byte>> get(const std::string& name, const std::string& dtype,
                                         std::span<const int64_t> shape) const override;
  Status refuse(const std::string& name, const std::string& must) const override;
  const SafetensorsFile& file() const { return *file_; }

 private:
  std::string name_;
  std::unique_ptr<SafetensorsFile> file_;
};

}  // namespace kvswap
