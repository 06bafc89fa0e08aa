#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <memory_resource>
#include <string>
#include <vector>

#include "methods/summary/huge_page_arena.h"
#include "methods/summary/summary_memory.h"

namespace kvswap {
namespace {

constexpr int64_t kPage = 4096;

int64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (status >> word) {
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
  }
  return -1;
}

struct Piece {
  std::byte* data;
  int64_t bytes;
  int fill;
};

bool is_filled(const Piece& piece) {
  for (int64_t i = 0; i < piece.bytes; ++i) {
    if (std::to_integer<int>(piece.data[i]) != piece.fill) return false;
  }
  return true;
}

Piece take_filled(HugePageArena& memory, int64_t bytes, int fill) {
  const Piece piece = {memory.take(bytes), bytes, fill};
  EXPECT_NE(piece.data, nullptr);
  std::memset(piece.data, fill, bytes);
  return piece;
}

TEST(HugePageArena, PiecesKeepWhatIsWrittenWhileOthersComeAndGo) {
  HugePageArena memory(*std::pmr::get_default_resource());
  std::vector<Piece> pieces;
  for (int i = 0; i < 400; ++i) {
    pieces.push_back(take_filled(memory, (i % 7 + 3) * kPage, i % 251 + 1));
    if (i % 3 == 2) {
      const Piece gone = pieces[pieces.size() / 2];
      EXPECT_TRUE(is_filled(gone));
      EXPECT_TRUE(memory.let_go(gone.data, gone.bytes));
      pieces.erase(pieces.begin() + static_cast<int64_t>(pieces.size()) / 2);
    }
  }
  for (const Piece& piece : pieces) EXPECT_TRUE(is_filled(piece));
  for (const Piece& piece : pieces) EXPECT_TRUE(memory.let_go(piece.data, piece.bytes));
  take_filled(memory, kPage, 5);
}

TEST(HugePageArena, TakesNoMoreThanItsPieces) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer's notes of what is touched count as memory";
#endif
  if (KVSWAP_CPU_IS_EMULATED) GTEST_SKIP() << "the emulator's own memory counts too";
  constexpr int64_t kPieces = 1000, kBytes = 9 * kPage, kSlack = int64_t{3} << 20;
  HugePageArena memory(*std::pmr::get_default_resource());
  std::vector<Piece> pieces;
  pieces.reserve(kPieces);
  const int64_t before = resident_bytes();
  for (int i = 0; i < kPieces; ++i) {
    pieces.push_back(take_filled(memory, kBytes, 1));
    if (i % 100 == 0) {
      EXPECT_LE(resident_bytes() - before, (i + 1) * kBytes + kSlack);
    }
  }
  EXPECT_GE(resident_bytes() - before, kPieces * kBytes - kSlack);
  for (int i = 1; i < kPieces; i += 2) EXPECT_TRUE(memory.let_go(pieces[i].data, kBytes));
  EXPECT_LE(resident_bytes() - before, kPieces / 2 * kBytes + kSlack) << "freed at once";
  for (int i = 0; i < kPieces; i += 2) EXPECT_TRUE(is_filled(pieces[i]));
}

TEST(HugePageArena, OthersAreNotItsPieces) {
  HugePageArena memory(*std::pmr::get_default_resource());
  take_filled(memory, kPage, 1);
  std::byte other{};
  EXPECT_FALSE(memory.let_go(&other, kPage));
  EXPECT_EQ(memory.take(100), nullptr) << "no whole page";
  EXPECT_EQ(memory.take(int64_t{1} << 60), nullptr) << "more than there is";
}

TEST(SummaryMemory, CountsPackedPiecesAsOthers) {
  const auto memory = make_host_summary_memory();
  auto packed = memory->allocate_packed(2 * kPage);
  auto own = memory->allocate(kPage);
  EXPECT_EQ(memory->live_bytes(), 3 * kPage);
  const auto other = make_host_summary_memory();
  auto shared = other->share(packed);
  std::memset(packed.get(), 3, 2 * kPage);
  packed.reset();
  own.reset();
  EXPECT_EQ(memory->live_bytes(), 0);
  EXPECT_EQ(other->live_bytes(), 2 * kPage);
  EXPECT_EQ(std::to_integer<int>(shared.get()[kPage]), 3) << "it outlives who made it";
}

}  // namespace
}  // namespace kvswap
