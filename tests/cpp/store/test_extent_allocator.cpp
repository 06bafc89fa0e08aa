#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "store/extent_allocator.h"

namespace kvswap {
namespace {

/// The same rules byte by byte: first fit, and the end falls back to the last byte in use.
class ByteMap {
 public:
  int64_t allocate(int64_t length) {
    int64_t run = 0;
    for (size_t i = 0; i < used_.size(); ++i) {
      run = used_[i] ? 0 : run + 1;
      if (run == length) return mark(static_cast<int64_t>(i) + 1 - length, length, true);
    }
    const auto offset = static_cast<int64_t>(used_.size());
    used_.resize(used_.size() + length, true);
    return offset;
  }
  void release(int64_t offset, int64_t length) {
    mark(offset, length, false);
    while (!used_.empty() && !used_.back()) used_.pop_back();
  }
  int64_t end() const { return static_cast<int64_t>(used_.size()); }
  int64_t free() const { return std::count(used_.begin(), used_.end(), false); }

 private:
  int64_t mark(int64_t offset, int64_t length, bool is_used) {
    for (int64_t i = offset; i < offset + length; ++i) {
      EXPECT_NE(used_[i], is_used);
      used_[i] = is_used;
    }
    return offset;
  }
  std::vector<bool> used_;
};

TEST(ExtentAllocator, EqualsAByteMap) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    ExtentAllocator extents;
    ByteMap bytes;
    std::vector<std::pair<int64_t, int64_t>> held;
    for (int step = 0; step < 400; ++step) {
      if (held.empty() || random() % 5 < 3 - (seed % 2)) {
        const int64_t length = 1 + random() % 9;
        const int64_t offset = extents.allocate(length);
        ASSERT_EQ(offset, bytes.allocate(length));
        held.push_back({offset, length});
      } else {
        const size_t at = random() % held.size();
        auto [offset, length] = held[at];
        held.erase(held.begin() + at);
        if (length > 1 && random() % 2) {  // in two pieces
          const int64_t first = 1 + random() % (length - 1);
          extents.release(offset, first);
          bytes.release(offset, first);
          offset += first;
          length -= first;
        }
        extents.release(offset, length);
        bytes.release(offset, length);
      }
      ASSERT_EQ(extents.end_bytes(), bytes.end());
      ASSERT_EQ(extents.free_bytes(), bytes.free());
    }
    for (const auto& [offset, length] : held) extents.release(offset, length);
    EXPECT_EQ(extents.end_bytes(), 0);
    EXPECT_EQ(extents.free_bytes(), 0);
  }
}

TEST(ExtentAllocator, ClearForgetsEverything) {
  ExtentAllocator extents;
  extents.allocate(10);
  const int64_t hole = extents.allocate(10);
  extents.allocate(10);
  extents.release(hole, 10);
  extents.clear();
  EXPECT_EQ(extents.end_bytes(), 0);
  EXPECT_EQ(extents.free_bytes(), 0);
  EXPECT_EQ(extents.allocate(5), 0);
}

TEST(ExtentAllocatorDeathTest, GivingBackTwiceIsOurMistake) {
  ExtentAllocator extents;
  const int64_t offset = extents.allocate(10);
  extents.allocate(10);
  extents.release(offset, 10);
  EXPECT_DEATH(extents.release(offset, 10), "does not hold");
}

}  // namespace
}  // namespace kvswap
