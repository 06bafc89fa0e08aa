#pragma once

#include <cstdint>
#include <functional>
#include <map>

namespace kvswap {

/// Hands out contiguous ranges of a file: first fit among what was given back, else at the end.
///
/// Given-back ranges are merged with their neighbours, and a range at the end lowers the end, so
/// that a long life of appends and crops does not grow the file without bound. Not thread-safe.
class ExtentAllocator {
 public:
  /// Offset of a range of `length_bytes`.
  int64_t allocate(int64_t length_bytes);
  void release(int64_t offset_bytes, int64_t length_bytes);
  /// One past the last byte in use: what the file must be able to hold.
  int64_t end_bytes() const { return end_bytes_; }
  int64_t free_bytes() const;
  void clear();
  /// Calls with offset and length for each range that was given back.
  void each_free(const std::function<void(int64_t, int64_t)>& range) const {
    for (const auto& [offset, length] : free_) range(offset, length);
  }

 private:
  std::map<int64_t, int64_t> free_;  // offset -> length; disjoint, never touching
  int64_t end_bytes_ = 0;
};

}  // namespace kvswap
