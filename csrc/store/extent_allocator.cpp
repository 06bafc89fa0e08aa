#include "store/extent_allocator.h"

#include "io/status.h"

namespace kvswap {

int64_t ExtentAllocator::allocate(int64_t length_bytes) {
  KVSWAP_ASSERT(length_bytes > 0);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < length_bytes) continue;
    const int64_t offset = it->first;
    const int64_t rest = it->second - length_bytes;
    free_.erase(it);
    if (rest > 0) free_.emplace(offset + length_bytes, rest);
    return offset;
  }
  const int64_t offset = end_bytes_;
  end_bytes_ += length_bytes;
  return offset;
}

void ExtentAllocator::release(int64_t offset_bytes, int64_t length_bytes) {
  KVSWAP_ASSERT(length_bytes > 0 && offset_bytes + length_bytes <= end_bytes_);
  auto next = free_.lower_bound(offset_bytes);
  KVSWAP_ASSERT(next == free_.end() || offset_bytes + length_bytes <= next->first);
  if (next != free_.end() && offset_bytes + length_bytes == next->first) {
    length_bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    KVSWAP_ASSERT(previous->first + previous->second <= offset_bytes);
    if (previous->first + previous->second == offset_bytes) {
      offset_bytes = previous->first;
      length_bytes += previous->second;
      free_.erase(previous);
    }
  }
  if (offset_bytes + length_bytes == end_bytes_) {
    end_bytes_ = offset_bytes;
  } else {
    free_.emplace(offset_bytes, length_bytes);
  }
}

int64_t ExtentAllocator::free_bytes() const {
  int64_t total = 0;
  for (const auto& [offset, length] : free_) total += length;
  return total;
}

void ExtentAllocator::clear() {
  free_.clear();
  end_bytes_ = 0;
}

}  // namespace kvswap
