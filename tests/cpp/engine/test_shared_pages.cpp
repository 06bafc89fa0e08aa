// Layers that give their pages to others between their steps (resident_layers).

#include "engine_run.h"
#include "how_long.h"
#include "io/faulty_kernel.h"

namespace kvswap {
namespace {

constexpr int64_t kLayers = 5;
constexpr int64_t kBatch = 2;

EngineOptions shared_options(const std::string& directory) {
  EngineOptions options = small_options(directory);
  options.layers = kLayers;
  options.ranks = {5, 8, 6, 5, 7};
  options.groups_max = 6;
  options.resident_layers = 2;
  options.tail_tokens = 4;
  options.merge_gap_bytes = 0;
  options.merge_bytes_max = 4096;  // one read a record
  return options;
}

/// Steps in which nobody looks ahead, judged one by one; what a disk refuses is asked again.
class Steps {
 public:
  explicit Steps(const EngineOptions& options) : run_(options, 7) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      run_.append(layer, kBatch, 90);
      EXPECT_TRUE(run_.set_projection(layer).is_ok());
    }
  }

  EngineRun& run() { return run_; }
  EngineCounters counters() { return run_.engine().context().counters; }
  int refused() const { return refused_; }

  /// `query`: of each layer; empty: drawn.
  void step(const std::vector<float>& query, FaultyKernel* kernel = nullptr) {
    for (int64_t layer = 0; layer < kLayers && !testing::Test::HasFatalFailure(); ++layer) {
      run_.append(layer, kBatch, 1);
      const std::vector<float> asked = query.empty() ? run_.draw_query(kBatch, 1) : query;
      std::vector<std::byte> output;
      Status attended = run_.attend(layer, asked, 1, output);
      if (!attended.is_ok() && kernel != nullptr) {
        ++refused_;
        EXPECT_EQ(attended.code(), StatusCode::kStorage) << attended.message();
        kernel->heal();
        attended = run_.attend(layer, asked, 1, output);
      }
      ASSERT_TRUE(attended.is_ok()) << attended.message();
      run_.expect_attended(layer, asked, 1, output);
    }
  }

 private:
  EngineRun run_;
  int refused_ = 0;
};

TEST(SharedPages, WhatWasAttendedLastIsReadBeforeItIsChosen) {
  const TestDirectory directory;
  EngineOptions options = shared_options(directory.path());
  options.pages_max = options.groups_max;  // nothing outlives the step of another layer
  Steps steps(options);
  const std::vector<float> query = steps.run().draw_query(kBatch, 1);
  steps.step(query);
  const EngineCounters before = steps.counters();
  const uint64_t read = steps.run().engine().context().fetcher->counters().records;
  steps.step(query);
  const EngineCounters after = steps.counters();
  const uint64_t attended = after.groups_attended - before.groups_attended;
  const uint64_t loaded = after.groups_loaded - before.groups_loaded;
  // The first layer alone has none before it to read behind.
  EXPECT_EQ(attended, 6u * kBatch * kLayers);
  EXPECT_GE(loaded, 6u * kBatch);
  EXPECT_LT(loaded, 2 * 6u * kBatch) << "a group was sealed, which may be chosen";
  const uint64_t again = after.groups_reloaded - before.groups_reloaded;
  EXPECT_GE(loaded + again, attended);
  EXPECT_EQ(steps.run().engine().context().fetcher->counters().records - read, loaded + again);
}

TEST(SharedPages, TakeTheMemoryOfTwoLayersAndNoMore) {
  const TestDirectory directory;
  EngineOptions options = shared_options(directory.path());
  const auto pages = [&] { return memory_need(options, 4096, 1, 0).of(Use::kPages); };
  const int64_t shared = pages();
  options.resident_layers.reset();
  EXPECT_EQ(pages() - shared, (kLayers - 2) * options.pages_max * 4096);
  options.resident_layers = kLayers + 3;
  EXPECT_FALSE(Plan(options, 4096).shares_pages);
}

TEST(SharedPages, EveryReadThatFailsIsReadAgainOrReported) {
  const TestDirectory directory;
  for (const char* reader : {"sync", "threads", "auto"}) {
    EngineOptions options = shared_options(directory.path());
    options.reader = reader;
    int struck = 0;
    for (const bool is_lasting : {false, true}) {
      for (uint64_t nth = 1; nth < 200 && !testing::Test::HasFatalFailure(); nth += 6 * stride(3)) {
        SCOPED_TRACE(std::string(reader) + ", read " + std::to_string(nth));
        Steps steps(options);
        steps.step({});
        FaultyKernel kernel;
        kernel.arm(
            {.call = KernelCall::kRead, .nth = nth, .is_lasting = is_lasting, .error_number = EIO});
        for (int i = 0; i < 2; ++i) steps.step({}, &kernel);
        const bool was_struck = kernel.injected() > 0;
        struck += was_struck;
        kernel.heal();
        steps.step({});
        steps.run().compare_contents();
        if (is_lasting && was_struck) {
          EXPECT_GT(steps.refused(), 0) << "no read of that layer came back";
        }
      }
    }
    EXPECT_GT(struck, lives(7, 20)) << reader;
  }
  EXPECT_TRUE(directory.is_empty());
}

TEST(SharedPages, ACropBringsBackTheTailsOfAllLayers) {
  const TestDirectory directory;
  for (const int64_t tail_tokens : {17, 40}) {  // fewer and more groups than a layer has pages
    SCOPED_TRACE(tail_tokens);
    EngineOptions options = shared_options(directory.path());
    options.tail_tokens = tail_tokens;
    options.pages_max = options.groups_max;
    Steps steps(options);
    for (const int64_t positions : {88, 61, 40}) {
      steps.step({});
      steps.run().crop(positions);
      steps.run().compare_contents();
      steps.step({});
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kvswap
