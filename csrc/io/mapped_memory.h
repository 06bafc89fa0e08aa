#pragma once

#include <cstddef>
#include <cstdint>

namespace kvswap {

/// Whole pages from the kernel, zeros at first, that neither a forked child nor a core dump gets;
/// they go back to it with their owner.
class MappedMemory {
 public:
  /// is_wiped: they are zeros again before they go back. See is_there().
  MappedMemory(int64_t bytes, bool is_wiped);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  /// Did the kernel give them?
  bool is_there() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  bool is_wiped_;
  std::byte* data_ = nullptr;
};

}  // namespace kvswap
