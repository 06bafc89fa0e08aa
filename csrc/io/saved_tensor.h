#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/status.h"

namespace kvswap {

/// A tensor that a part of a session has to be saved: written in pieces, so that nothing large
/// stands in memory twice.
struct SavedTensor {
  std::string name;
  std::string dtype;  // as safetensors writes it: F32, U32, BOOL, ...
  std::vector<int64_t> shape;
  int64_t row_bytes = 0;  // of one index of the first dimension
  /// Copies rows [first, first + count) to `target`.
  std::function<Status(int64_t first, int64_t count, std::byte* target)> read;

  int64_t bytes() const { return shape.empty() ? 0 : shape[0] * row_bytes; }
};

/// The bytes of a tensor, row-major and perhaps not aligned, as long as this or a copy of it lives.
class SavedBytes {
 public:
  SavedBytes() = default;
  SavedBytes(std::span<const std::byte> bytes, std::shared_ptr<const void> owner)
      : owner_(std::move(owner)), bytes_(bytes) {}
  operator std::span<const std::byte>() const& { return bytes_; }
  operator std::span<const std::byte>() && = delete;

  const std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> subspan(size_t offset, size_t count) const {
    return bytes_.subspan(offset, count);
  }

 private:
  std::shared_ptr<const void> owner_;
  std::span<const std::byte> bytes_;
};

/// The tensors of a saved session.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  virtual bool has(const std::string& name) const = 0;
  /// kCorrupt unless it is there with this dtype and shape.
  virtual Result<SavedBytes> get(const std::string& name, const std::string& dtype,
                                 std::span<const int64_t> shape) const = 0;
  /// kCorrupt naming a tensor and what it must be.
  virtual Status refuse(const std::string& name, const std::string& must) const = 0;
};

}  // namespace kvswap
