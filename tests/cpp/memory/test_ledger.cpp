#include <gtest/gtest.h>

#include <set>

#include "memory/ledger.h"

namespace kvswap {
namespace {

TEST(Ledger, CountsByUseAndRemembersThePeak) {
  Ledger ledger(1000);
  EXPECT_TRUE(ledger.charge(Use::kPages, 600, "pages").is_ok());
  EXPECT_TRUE(ledger.charge(Use::kSummary, 300, "a summary").is_ok());
  ledger.release(Use::kPages, 500);
  EXPECT_EQ(ledger.used(Use::kPages), 100);
  EXPECT_EQ(ledger.used(Use::kSummary), 300);
  EXPECT_EQ(ledger.used(Use::kScratch), 0);
  EXPECT_EQ(ledger.total(), 400);
  EXPECT_EQ(ledger.peak(), 900);
}

TEST(Ledger, HoldsExactlyItsLimit) {
  Ledger ledger(1000);
  EXPECT_TRUE(ledger.check(1000, "all").is_ok());
  EXPECT_FALSE(ledger.check(1001, "all and one").is_ok());
  EXPECT_TRUE(ledger.charge(Use::kTables, 1000, "all").is_ok());
  EXPECT_TRUE(ledger.charge(Use::kTables, 0, "nothing").is_ok());
  const Status refused = ledger.charge(Use::kPages, 24, "a context of 7 tokens");
  EXPECT_EQ(refused.code(), StatusCode::kBudget);
  for (const char* part : {"kv_memory_bytes", "a context of 7 tokens", "1024", "got 1000"}) {
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused.message();
  }
  EXPECT_EQ(ledger.total(), 1000) << "nothing is charged on error";
  EXPECT_EQ(ledger.used(Use::kPages), 0);
  EXPECT_EQ(ledger.peak(), 1000);
}

TEST(Ledger, WithoutALimitCountsAll) {
  Ledger ledger(-1);
  EXPECT_TRUE(ledger.charge(Use::kPages, int64_t{1} << 60, "much").is_ok());
  EXPECT_EQ(ledger.total(), int64_t{1} << 60);
}

TEST(Ledger, ALimitOfZeroHoldsNothing) {
  Ledger ledger(0);
  EXPECT_FALSE(ledger.charge(Use::kPages, 1, "a byte").is_ok());
}

TEST(LedgerDeathTest, ReleasingWhatWasNotChargedIsOurMistake) {
  Ledger ledger(10);
  EXPECT_DEATH(ledger.release(Use::kPages, 1), "does not hold");
}

TEST(Ledger, EveryUseHasAName) {
  std::set<std::string> names;
  for (int use = 0; use < kUses; ++use) names.insert(use_name(static_cast<Use>(use)));
  EXPECT_EQ(static_cast<int>(names.size()), kUses);
  EXPECT_FALSE(names.contains("?"));
}

TEST(Ledger, TakesAnArenaWholeOrNotAtAll) {
  Arena arena;
  arena.take(Use::kPages, 600);
  arena.take(Use::kTables, 100);
  arena.take(Use::kPages, 100);
  EXPECT_EQ(arena.total(), 800);
  EXPECT_EQ(arena.of(Use::kPages), 700);
  EXPECT_EQ(arena.only({Use::kTables, Use::kRetained}).total(), 100);
  Ledger ledger(1000);
  EXPECT_TRUE(ledger.charge(arena, "an arena").is_ok());
  EXPECT_EQ(ledger.used(Use::kTables), 100);
  EXPECT_EQ(ledger.charge(arena.only({Use::kPages}), "more").code(), StatusCode::kBudget);
  EXPECT_EQ(ledger.total(), 800);
  ledger.release(arena);
  EXPECT_EQ(ledger.total(), 0);
  EXPECT_EQ(ledger.peak(), 800);
}

TEST(Arena, HoldsWhatNoBudgetDoes) {
  Arena arena;
  for (int use = 0; use < kUses; ++use) {
    for (int time = 0; time < 3; ++time) {
      arena.take(static_cast<Use>(use), size_product({kTooManyBytes, kTooManyBytes}));
    }
  }
  EXPECT_EQ(arena.of(Use::kPages), kTooManyBytes);
  EXPECT_EQ(arena.total(), kUses * kTooManyBytes);
}

}  // namespace
}  // namespace kvswap
