// Turns: what is kept is right whatever fails, and counts against the budget.

#include "engine/settings_check.h"
#include "keeping_run.h"

namespace kvswap {
namespace {

TEST(RetentionManager, ATurnThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(keeping_options, "box", 2 * kParts, 10);
}

TEST(RetentionManager, AWalkOverAllThatIsOnDiskThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(disk_options, "none", 2 * kParts + 1, 10, 150);
}

TEST(RetentionManager, ATurnOfAllLayersThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(divided_options, "none", kParts, 10);
}

TEST(RetentionManager, AWalkForOutliersThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(outlier_options, "mean", kParts, 12);
}

TEST(RetentionManager, ATurnThatDecidesHowManyStayIsMadeAgainAndRight) {
  // Whole groups of the 10 there is room for.
  expect_right_after_faults(shared_options, "box", 2 * kParts, 8);
}

TEST(OnlineRetention, ATurnThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(joining_options, "box", 3 * kParts, 10);
  // 3 of 10 in the model's dtype, and in e4m3 4, then 5 in the room of 1 and 2; and a group of 4.
  expect_right_after_faults(mixed_options, "box", 3 * kParts, 12);
}

TEST(OnlineRetention, WhatLeavesTheTailIsRetainedUntilThereIsNoRoomAndNothingIsRead) {
  const TestDirectory directory;
  EngineOptions options = joining_options(directory.path(), "none");
  options.keep_tokens = 20;
  ReadFaults faults;
  Pair pair(options, options);
  const EngineContext& parts = pair.one().engine().context();
  std::vector<double> retained;
  std::vector<uint64_t> refreshes;
  uint64_t read = 0;
  for (int64_t step = 0; step < 24; ++step) {
    pair.step(0, faults);
    if (step == 0) read = parts.fetcher->reader().counters().bytes;
    if (step % 4 != 0) continue;
    retained.push_back(2 * tokens_retained(pair.one().engine()));  // one of two layers keeps them
    refreshes.push_back(parts.counters.refreshes / kBatch);
    EXPECT_EQ(tokens_dropped(pair.one().engine()), (151 + step - 11 - retained.back()) / 2);
  }
  // Groups of 4 are sealed after the steps that make 152, 156 ... tokens of 151.
  EXPECT_EQ(retained, (std::vector<double>{20, 15 + 4, 14 + 4, 13 + 4, 12 + 4, 20}));
  EXPECT_EQ(refreshes, (std::vector<uint64_t>{1, 2, 3, 4, 5, 5}));
  EXPECT_EQ(parts.fetcher->reader().counters().bytes, read) << "kept tokens and the tail suffice";
  ASSERT_TRUE(pair.one().engine().crop(160).is_ok());
  EXPECT_LE(2 * tokens_retained(pair.one().engine()), 20);
  ASSERT_TRUE(pair.one().engine().crop(5).is_ok());
  EXPECT_EQ(tokens_retained(pair.one().engine()), 0);
}

TEST(OnlineRetention, AllThatIsDecodedStaysWhereThereIsRoom) {
  const TestDirectory directory;
  EngineOptions options = joining_options(directory.path(), "none");
  options.keep_tokens = 200;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 40; ++step) pair.step(0, faults);
  EXPECT_EQ(tokens_dropped(pair.one().engine()), 0.0);
  EXPECT_EQ(pair.one().engine().context().counters.refreshes, 2u) << "after the prompt alone";
}

TEST(RetentionManager, NothingIsRetainedWhileEverythingFits) {
  const TestDirectory directory;
  EngineOptions options = keeping_options(directory.path());
  options.groups_max = options.pages_max = 50;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 12; ++step) EXPECT_EQ(pair.step(0, faults), 1);
  EXPECT_EQ(pair.one().engine().context().counters.refreshes, 0u);
  EXPECT_EQ(tokens_retained(pair.one().engine()), 0);
}

TEST(RetentionManager, WithoutRowsOnlyWhatIsRetainedIsAttended) {
  const TestDirectory directory;
  EngineOptions options = keeping_options(directory.path(), "none");
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 8; ++step) pair.step(0, faults);
  EXPECT_EQ(pair.one().engine().context().counters.groups_attended, 0u);
  EXPECT_EQ(tokens_retained(pair.one().engine()), 5) << "in one of two layers";
  options.keeper = "none";
  EXPECT_TRUE(is_exact(options, 0));
}

TEST(RetentionManager, CountsAgainstTheBudget) {
  const TestDirectory directory;
  expect_counted(keeping_options(directory.path()));
  expect_counted(disk_options(directory.path(), "box"));
  expect_counted(shared_options(directory.path(), "box"));
  expect_counted(joining_options(directory.path(), "box"));
  expect_counted(mixed_options(directory.path(), "box"));
  EngineOptions of_prompt = mixed_options(directory.path(), "none");
  of_prompt.keep_ratio.reset();
  expect_counted(of_prompt);
}

}  // namespace
}  // namespace kvswap
