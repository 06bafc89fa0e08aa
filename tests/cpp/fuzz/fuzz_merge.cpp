// The merge planner: every record's bytes land once in its target, and only gaps in the scrap area.

#include <map>
#include <vector>

#include "fuzz_target.h"
#include "io/read_coalescing.h"

namespace {

constexpr int64_t kUnit = 512;

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvswap;
  FuzzInput input(data, size);
  const int64_t gap_max = input.below(64) * kUnit;
  const int64_t merged_max = input.below(256) * kUnit;
  std::vector<std::byte> memory(1 << 20);
  std::vector<std::byte> discard_buffer(static_cast<size_t>(gap_max) + 1);
  std::vector<Placement> placements;
  std::map<int64_t, std::byte*> expected;  // where each block of the file lands
  int64_t offset = 0;
  size_t used = 0;
  while (!input.is_empty()) {
    offset += input.below(40) * kUnit;
    const int64_t length = (1 + input.below(8)) * kUnit;
    // Targets now touch and now do not.
    used += static_cast<size_t>(input.below(2) * kUnit);
    if (used + static_cast<size_t>(length) > memory.size()) break;
    placements.push_back({offset, length, memory.data() + used});
    for (int64_t at = 0; at < length; at += kUnit) {
      expected[offset + at] = memory.data() + used + at;
    }
    offset += length;
    used += static_cast<size_t>(length);
  }
  // In any order.
  for (size_t i = 1; i < placements.size(); ++i) {
    std::swap(placements[i], placements[(i * 7) % (i + 1)]);
  }
  MergedReads merged;
  merged.build(placements, {.gap_bytes_max = gap_max,
                            .merged_bytes_max = merged_max,
                            .discard_buffer = gap_max > 0 ? discard_buffer.data() : nullptr});
  int64_t gaps = 0;
  for (const BlockRead& read : merged.reads()) {
    CHECK(!read.targets.empty() && read.targets.size() <= static_cast<size_t>(kTargetsMax));
    int64_t at = read.offset_bytes;
    for (const iovec& target : read.targets) {
      auto* base = static_cast<std::byte*>(target.iov_base);
      const bool is_gap = base == discard_buffer.data();
      CHECK(!is_gap || target.iov_len <= static_cast<size_t>(gap_max));
      for (size_t done = 0; done < target.iov_len; done += kUnit, at += kUnit) {
        const auto found = expected.find(at);
        CHECK(is_gap == (found == expected.end()));
        if (is_gap) {
          gaps += kUnit;
          continue;
        }
        CHECK(found->second == base + done);
        expected.erase(found);
      }
    }
  }
  CHECK(expected.empty());
  CHECK(gaps == merged.gap_bytes());
  return 0;
}
