#pragma once

#include <cstdint>
#include <string>

#include "io/saved_tensor.h"
#include "kvswap/safetensors_header.h"

namespace kvswap {

/// Begins the name of what a program keeps beside the session's own tensors.
inline constexpr const char* kKeptPrefix = "kept.";

/// A session's tensors in a safetensors file; each is read when it is asked for.
class SavedState final : public SavedTensors {
 public:
  /// fd: of a file of size_bytes, open as long as this lives; name: in messages. Throws
  /// SessionError: kCorrupt for what is damaged, kStorage for a disk that fails.
  SavedState(int fd, int64_t size_bytes, std::string name);

  bool has(const std::string& name) const override;
  Result<SavedBytes> get(const std::string& name, const std::string& dtype,
                         std::span<const int64_t> shape) const override;
  Status refuse(const std::string& name, const std::string& must) const override;
  const SafetensorsHeader& header() const { return header_; }
  Result<SavedBytes> read(const SafetensorsEntry& tensor) const;
  /// Of the whole file, which is read for it.
  Result<uint64_t> checksum() const;

 private:
  const int fd_;
  const int64_t size_bytes_;
  const std::string name_;
  SafetensorsHeader header_;
};

}  // namespace kvswap
