#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "io/read_coalescing.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kUnit = 512;

/// Does what the reads ask, byte by byte.
void perform(std::span<const BlockRead> reads, std::span<const std::byte> file) {
  for (const BlockRead& read : reads) {
    int64_t at = read.offset_bytes;
    for (const iovec& target : read.targets) {
      for (size_t byte = 0; byte < target.iov_len; ++byte) {
        static_cast<std::byte*>(target.iov_base)[byte] = file[static_cast<size_t>(at++)];
      }
    }
  }
}

int64_t length_of(const BlockRead& read) {
  int64_t length = 0;
  for (const iovec& target : read.targets) length += static_cast<int64_t>(target.iov_len);
  return length;
}

TEST(Merge, EveryRecordLandsInItsTarget) {
  AlignedBytes file(512 * kUnit);
  fill_random(file.span(), 21);
  const AlignedBytes discard_buffer(64 * kUnit);
  std::mt19937_64 random(22);
  MergedReads merged;
  for (int round = 0; round < 400; ++round) {
    const MergeOptions options{
        .gap_bytes_max = static_cast<int64_t>(random() % 9) * kUnit,
        .merged_bytes_max = static_cast<int64_t>(1 + random() % 64) * kUnit,
        .discard_buffer = random() % 4 == 0 ? nullptr : discard_buffer.data()};
    const AlignedBytes landing(512 * kUnit);
    std::vector<Placement> placements;
    int64_t needed = 0;
    for (int64_t unit = 0; unit < 512;) {
      const auto length = static_cast<int64_t>(1 + random() % 4);
      if (unit + length > 512) break;
      if (random() % 3 != 0) {
        // Targets in file order half the time, so that neighbours touch in memory too.
        placements.push_back({unit * kUnit, length * kUnit, landing.data() + unit * kUnit});
        needed += length * kUnit;
      }
      unit += length;
    }
    std::shuffle(placements.begin(), placements.end(), random);
    const std::vector<Placement> asked = placements;
    merged.build(placements, options);
    perform(merged.reads(), file.span());
    for (const Placement& placement : asked) {
      ASSERT_EQ(std::memcmp(placement.target, file.data() + placement.offset_bytes,
                            static_cast<size_t>(placement.length_bytes)),
                0);
    }
    int64_t total = 0;
    int64_t end = -1;
    for (const BlockRead& read : merged.reads()) {
      ASSERT_GT(read.offset_bytes, end);
      ASSERT_LE(read.targets.size(), static_cast<size_t>(kTargetsMax));
      ASSERT_EQ(read.offset_bytes % kUnit, 0);
      total += length_of(read);
      end = read.offset_bytes + length_of(read) - 1;
      const bool is_one = std::any_of(asked.begin(), asked.end(), [&](const Placement& one) {
        return one.offset_bytes == read.offset_bytes && one.length_bytes == length_of(read);
      });
      ASSERT_TRUE(length_of(read) <= options.merged_bytes_max || is_one);
    }
    ASSERT_EQ(total, needed + merged.gap_bytes());
    if (options.discard_buffer == nullptr) {
      ASSERT_EQ(merged.gap_bytes(), 0);
    }
  }
}

TEST(Merge, NothingGivesNoReads) {
  MergedReads merged;
  merged.build({}, {});
  EXPECT_TRUE(merged.reads().empty());
}

TEST(Merge, AGapLandsInTheScrapArea) {
  const AlignedBytes memory(4 * 4096);
  std::vector<Placement> placements = {{8192, 4096, memory.data()},
                                       {0, 4096, memory.data() + 4096}};
  MergedReads merged;
  merged.build(placements, {.gap_bytes_max = 4096, .discard_buffer = memory.data() + 8192});
  ASSERT_EQ(merged.reads().size(), 1u);
  ASSERT_EQ(merged.reads()[0].targets.size(), 3u);
  EXPECT_EQ(merged.reads()[0].targets[1].iov_base, memory.data() + 8192);
  EXPECT_EQ(merged.gap_bytes(), 4096);
}

TEST(Merge, TargetsThatTouchBecomeOne) {
  const AlignedBytes memory(4 * 4096);
  std::vector<Placement> placements = {{0, 4096, memory.data()},
                                       {4096, 4096, memory.data() + 4096}};
  MergedReads merged;
  merged.build(placements, {});
  ASSERT_EQ(merged.reads().size(), 1u);
  EXPECT_EQ(merged.reads()[0].targets.size(), 1u);
}

TEST(Merge, StaysWithinTheTargetsOfARead) {
  const AlignedBytes memory(1024 * 512);
  const AlignedBytes discard_buffer(4096);
  std::vector<Placement> placements;
  for (int64_t index = 0; index < 512; ++index) {
    placements.push_back({2 * index * 512, 512, memory.data() + (511 - index) * 1024});
  }
  MergedReads merged;
  merged.build(
      placements,
      {.gap_bytes_max = 512, .merged_bytes_max = 1 << 20, .discard_buffer = discard_buffer.data()});
  EXPECT_EQ(merged.reads().size(), 4u);
}

}  // namespace
}  // namespace kvswap
