#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "io/memory_file.h"
#include "io/readers.h"
#include "io/write_queue.h"

namespace kvswap {
namespace {

constexpr int64_t kUnit = MemoryFile::kAlignment;
constexpr int64_t kBlock = MemoryFile::kBlockBytes;

std::vector<std::byte> filled(int64_t bytes, int value) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(value));
}

TEST(MemoryFile, HoldsWhatIsWrittenUntilItIsDiscarded) {
  MemoryFile file;
  ASSERT_TRUE(file.write(kBlock - kUnit, filled(2 * kUnit, 7)).is_ok());
  EXPECT_EQ(file.allocated_bytes(), 2 * kBlock);
  std::vector<std::byte> read(2 * kUnit);
  ASSERT_TRUE(file.read(kBlock - kUnit, read));
  EXPECT_EQ(read, filled(2 * kUnit, 7));
  EXPECT_FALSE(file.read(kBlock - 2 * kUnit, read)) << "half of it was never written";
  EXPECT_FALSE(file.read(9 * kBlock, read));
  file.discard(kBlock - kUnit, kUnit);
  EXPECT_EQ(file.allocated_bytes(), kBlock);
  EXPECT_FALSE(file.read(kBlock - kUnit, read));
  file.discard(0, 100 * kBlock);
  EXPECT_EQ(file.allocated_bytes(), 0);
  ASSERT_TRUE(file.write(0, filled(kUnit, 1)).is_ok());
  ASSERT_TRUE(file.shrink(0).is_ok());
  EXPECT_EQ(file.allocated_bytes(), 0);
}

TEST(MemoryFile, IsAsAPlainArrayWhateverIsWrittenAndDiscarded) {
  constexpr int64_t kUnits = 600;  // some five blocks
  std::mt19937 random(3);
  MemoryFile file;
  std::vector<int> units(kUnits, -1);  // what each holds; -1: nothing
  for (int turn = 0; turn < 3000; ++turn) {
    const auto first = static_cast<int64_t>(random() % kUnits);
    const int64_t count = std::min<int64_t>(kUnits - first, 1 + random() % 200);
    const int value = static_cast<int>(random() % 251);
    const bool is_discarded = random() % 2 == 0;
    if (is_discarded) {
      file.discard(first * kUnit, count * kUnit);
    } else {
      ASSERT_TRUE(file.write(first * kUnit, filled(count * kUnit, value)).is_ok());
    }
    for (int64_t i = first; i < first + count; ++i) units[i] = is_discarded ? -1 : value;
    const auto place = static_cast<int64_t>(random() % kUnits);
    std::vector<std::byte> read(kUnit);
    ASSERT_EQ(file.read(place * kUnit, read), units[place] >= 0);
    if (units[place] >= 0) {
      ASSERT_EQ(read, filled(kUnit, units[place]));
    }
  }
  int64_t blocks = 0;
  for (int64_t first = 0; first < kUnits; first += kBlock / kUnit) {
    const int64_t end = std::min(kUnits, first + kBlock / kUnit);
    bool is_held = false;
    for (int64_t i = first; i < end; ++i) is_held = is_held || units[i] >= 0;
    blocks += is_held;
  }
  EXPECT_EQ(file.allocated_bytes(), blocks * kBlock);
}

TEST(MemoryFile, IsReadAndWrittenWithinTheCalls) {
  MemoryFile file;
  auto queue =
      WriteQueue::create(&file, {.buffer_bytes = 4096, .buffers = 1, .is_within_calls = true});
  ASSERT_TRUE(queue.is_ok());
  for (int i = 0; i < 3; ++i) {
    auto buffer = queue.value()->acquire();
    ASSERT_TRUE(buffer.is_ok());
    std::memset(buffer.value().data, i, 4096);
    auto number = queue.value()->submit(buffer.value(), i * 4096, 4096);
    ASSERT_TRUE(number.is_ok());
    EXPECT_EQ(queue.value()->written(), number.value()) << "written by now";
  }
  auto opened = open_reader(file, {.kind = ReaderKind::kUring});
  ASSERT_TRUE(opened.is_ok());
  BlockReader& reader = *opened.value().reader;
  EXPECT_EQ(reader.name(), "memory");
  alignas(512) std::byte bytes[1024];
  const iovec targets[] = {{bytes, 512}, {bytes + 512, 512}};
  const BlockRead reads[] = {{4096 + 3584, targets}};
  auto ticket = reader.submit(reads);
  ASSERT_TRUE(ticket.is_ok());
  EXPECT_TRUE(reader.is_done(ticket.value()));
  ASSERT_TRUE(reader.wait(ticket.value()).is_ok());
  EXPECT_EQ(bytes[0], std::byte{1});
  EXPECT_EQ(bytes[1023], std::byte{2});
  EXPECT_EQ(reader.counters().bytes, 0u) << "nothing comes from a disk";
  file.discard(8192, 512);
  ticket = reader.submit(reads);
  ASSERT_TRUE(ticket.is_ok());
  EXPECT_EQ(reader.wait(ticket.value()).code(), StatusCode::kStorage);
  EXPECT_FALSE(reader.wait(ticket.value()).is_ok()) << "a ticket is waited for once";
}

}  // namespace
}  // namespace kvswap
