#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
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

/// The tensors of a saved session, as long as it lives.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  virtual bool has(const std::string& name) const = 0;
  /// Row-major bytes, perhaps not aligned; kCorrupt unless it is there with this dtype and shape.
  virtual Result<std::span<const std::byte>> get(const std::string& name, const std::string& dtype,
                                                 std::span<const int64_t> shape) const = 0;
  /// kCorrupt naming a tensor and what it must be.
  virtual Status refuse(const std::string& name, const std::string& must) const = 0;
};

}  // namespace kvswap
