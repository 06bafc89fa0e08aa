// The extent allocator against a map of bytes: no byte is lent twice, none is lost.

#include <algorithm>
#include <utility>
#include <vector>

#include "fuzz_target.h"
#include "store/extent_allocator.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  kvswap::ExtentAllocator extents;
  std::vector<bool> is_lent;
  std::vector<std::pair<int64_t, int64_t>> lent;
  const auto mark = [&](int64_t offset, int64_t length, bool value) {
    CHECK(offset >= 0);
    if (static_cast<int64_t>(is_lent.size()) < offset + length) is_lent.resize(offset + length);
    for (int64_t at = offset; at < offset + length; ++at) {
      CHECK(is_lent[at] != value);
      is_lent[at] = value;
    }
  };
  while (!input.is_empty()) {
    const int64_t what = input.below(100);
    if (what == 99) {
      extents.clear();
      lent.clear();
      is_lent.assign(is_lent.size(), false);
    } else if (what < 50 || lent.empty()) {
      const int64_t length = 1 + input.below(64);
      const int64_t offset = extents.allocate(length);
      mark(offset, length, true);
      lent.emplace_back(offset, length);
    } else {
      const auto chosen = lent.begin() + input.below(static_cast<int64_t>(lent.size()));
      auto& [offset, length] = *chosen;
      // All of it, or what is at its end.
      const int64_t retained = what < 75 ? 0 : input.below(length);
      extents.release(offset + retained, length - retained);
      mark(offset + retained, length - retained, false);
      length = retained;
      if (retained == 0) lent.erase(chosen);
    }
    const auto last = std::find(is_lent.rbegin(), is_lent.rend(), true);
    CHECK(extents.end_bytes() == is_lent.rend() - last);
    const int64_t free = std::count(is_lent.begin(), is_lent.begin() + extents.end_bytes(), false);
    CHECK(extents.free_bytes() == free);
  }
  return 0;
}
