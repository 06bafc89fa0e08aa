// crop, select_sequences, reset and set_projection: what stays must be as if it had always been so.

#include "engine_run.h"

namespace kvswap {
namespace {

TEST(Crop, LeavesTheStateOfAFreshEngineOfThatLength) {
  const TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  for (int64_t retained = 0; retained <= 90; ++retained) {
    SCOPED_TRACE(retained);
    EngineRun cropped(options, 3);
    EngineRun fresh(options, 3);
    const Tokens all = cropped.draw_tokens(2, 90);
    Tokens first{retained, {}, {}};
    for (int64_t row = 0; row < 2 * options.kv_heads; ++row) {
      const auto begin = row * 90 * options.head_dim;
      const auto end = begin + retained * options.head_dim;
      first.keys.insert(first.keys.end(), &all.keys[begin], &all.keys[end]);
      first.values.insert(first.values.end(), &all.values[begin], &all.values[end]);
    }
    ASSERT_TRUE(cropped.set_projection(0).is_ok());
    const auto& projection = cropped.memory().layer(0);
    ASSERT_TRUE(fresh.engine()
                    .set_projection(0, options.ranks[0], projection.key_projection.data(),
                                    projection.query_projection.data())
                    .is_ok());
    ASSERT_TRUE(cropped.give(0, all, 2).is_ok());
    ASSERT_TRUE(cropped.engine().crop(retained).is_ok());
    if (retained > 0) {
      ASSERT_TRUE(fresh.give(0, first, 2).is_ok());
    }

    // The next token sees the same in both.
    const Tokens next = cropped.draw_tokens(2, 1);
    const std::vector<float> query = cropped.draw_query(2, 1);
    std::vector<std::byte> outputs[2];
    EngineRun* runs[] = {&cropped, &fresh};
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(runs[i]->give(0, next, 2).is_ok());
      const Status attended = runs[i]->attend(0, query, 1, outputs[i]);
      ASSERT_TRUE(attended.is_ok()) << attended.message();
    }
    if (retained > options.select_queries_max) {
      ASSERT_EQ(cropped.engine().sequences().layer(0).sealed_groups,
                fresh.engine().sequences().layer(0).sealed_groups);
      ASSERT_EQ(cropped.engine().last_selection(0), fresh.engine().last_selection(0));
      for (const Use use : {Use::kPages, Use::kSummary, Use::kTables, Use::kProjections}) {
        ASSERT_EQ(cropped.engine().context().ledger.used(use),
                  fresh.engine().context().ledger.used(use));
      }
      ASSERT_EQ(cropped.engine().context().store->bytes_held(),
                fresh.engine().context().store->bytes_held());
    }
    ASSERT_TRUE(outputs[0] == outputs[1]);
  }
}

TEST(Crop, FollowedByOtherTokensForgetsTheOldOnes) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 8);
  run.forward(2, 120);
  const int64_t written = run.engine().context().file->allocated_bytes();
  for (int refresh = 0; refresh < 20 && !testing::Test::HasFatalFailure(); ++refresh) {
    run.crop(60);
    run.forward(2, 57);
    run.forward(2, 3);
    run.compare_contents();
  }
  EXPECT_EQ(run.engine().context().file->allocated_bytes(), written) << "space must be used again";
}

TEST(Crop, OutOfRangeIsRefusedOrDoesNothing) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 8);
  run.forward(1, 30);
  EXPECT_EQ(run.engine().crop(-1).code(), StatusCode::kInvalid);
  run.crop(1000);
  EXPECT_EQ(run.engine().positions(0), 30);
}

TEST(SelectSequences, TakesNoMoreMemoryThanTheBatchNeeds) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  {
    EngineRun probe(options, 1);
    options.kv_memory_bytes = 1 << 20;  // staging follows the budget down to a floor
    options.kv_memory_bytes =
        memory_need(options, probe.engine().context().record_bytes(), 4, 400).total();
  }
  EngineRun run(options, 1);
  run.forward(4, 100);
  for (int step = 0; step < 60 && !testing::Test::HasFatalFailure(); ++step) {
    run.forward(4, 1);
    run.select({run.draw(0, 3), run.draw(0, 3), run.draw(0, 3), run.draw(0, 3)});
  }
  run.compare_contents();
}

TEST(SelectSequences, SharedPastIsOnceOnDisk) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 2);
  run.forward(1, 200);
  const int64_t bytes = run.engine().context().store->bytes_held();
  run.select({0, 0, 0, 0});
  EXPECT_EQ(run.engine().context().store->bytes_held(), bytes);
  run.forward(4, 4);
  run.forward(4, 40);
  run.compare_contents();
  run.select({3});
  run.crop(199);
  EXPECT_LE(run.engine().context().store->bytes_held(), bytes);
  run.compare_contents();
}

TEST(SelectSequences, RefusesWhatIsNotThere) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.max_batch = 2;
  EngineRun run(options, 2);
  run.forward(2, 50);
  const std::vector<int64_t> wrong[] = {{0, 2}, {-1}, {0, 1, 0}, {}};
  for (const auto& indices : wrong) {
    EXPECT_EQ(run.engine().select_sequences(indices).code(), StatusCode::kInvalid);
  }
  EXPECT_EQ(run.engine().batch(), 2);
  run.compare_contents();
}

TEST(Reset, FreesTheWayForAnotherBatchUnderTheSameBudget) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  {
    EngineRun probe(options, 1);
    const int64_t record = probe.engine().context().record_bytes();
    options.kv_memory_bytes = 1 << 20;
    options.kv_memory_bytes = std::max(memory_need(options, record, 6, 40).total(),
                                       memory_need(options, record, 1, 3000).total());
  }
  EngineRun run(options, 4);
  for (int refresh = 0; refresh < 2; ++refresh) {
    run.forward(6, 40);
    run.reset();
    EXPECT_EQ(run.engine().batch(), 0);
    run.forward(1, 2990);
    run.forward(1, 4);
    run.compare_contents();
    run.reset();
    EXPECT_EQ(run.engine().context().store->bytes_held(), 0);
  }
}

TEST(SetProjection, RefusesAnotherRankAndKeepsTheOld) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 2);
  ASSERT_TRUE(run.set_projection(0).is_ok());
  const std::vector<float> wrong(16 * 64, 1.0f);
  EXPECT_EQ(run.engine().set_projection(0, 7, wrong.data(), wrong.data()).code(),
            StatusCode::kInvalid);
  EXPECT_EQ(run.engine().set_projection(9, 5, wrong.data(), wrong.data()).code(),
            StatusCode::kInvalid);
  run.forward(2, 100);
  run.forward(2, 2);
}

TEST(SetProjection, BetweenAppendAndAttendCountsWhatTheTailStillHolds) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 2);
  run.forward(2, 30);
  for (int step = 0; step < 40 && !testing::Test::HasFatalFailure(); ++step) {
    run.forward(2, 3);
    ASSERT_TRUE(run.set_projection(step % 2).is_ok());
    run.crop(run.engine().positions(0) - step % 2);
    run.select({1, 0});
  }
  run.compare_contents();
}

}  // namespace
}  // namespace kvswap
