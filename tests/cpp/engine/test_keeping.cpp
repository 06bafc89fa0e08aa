// Turns: what is kept is right whatever fails, here and on a device, and counts against the budget.

#include <optional>

#include "device/host_device.h"
#include "engine/engine_report.h"
#include "engine_run.h"
#include "io/fault_injection.h"

namespace kvswap {
namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kWindow = 20;  // more than one call of the kernel takes
// Each read fails once, or where that takes too long one in so many.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kEvery = 9;
#else
constexpr uint64_t kEvery = 1;
#endif

EngineOptions keeping_options(const std::string& directory, const std::string& rows = "box") {
  EngineOptions options = small_options(directory);
  options.rows = rows;
  options.ranks.clear();
  options.head_dim = 64;
  options.tail_tokens = 4;
  options.keeper = "observed";
  options.keep_tokens = 10;
  options.keep_window = kWindow;
  options.keep_interval = 5;
  return options;
}

/// Engines that are told the same: a prompt, what its newest queries attended, and steps.
class Pair {
 public:
  Pair(const EngineOptions& one, const EngineOptions& other) : one_(one, 5), other_(other, 5) {
    for (int64_t layer = 0; layer < one.layers; ++layer) {
      const Tokens drawn = one_.draw_tokens(kBatch, 150);
      KeptTokens::Window window;
      window.count = kWindow;
      window.first_column = 150 - kWindow;
      window.scale = 0.1f;
      const std::vector<float> queries = one_.numbers(one.query_heads * kWindow * one.head_dim, 2);
      const auto* bytes = reinterpret_cast<const std::byte*>(queries.data());
      window.queries.assign(bytes, bytes + queries.size() * sizeof(float));
      window.log_sum_exp.assign(one.query_heads * kWindow, 8.0f);
      set_projections(one, layer);
      for (EngineRun* run : {&one_, &other_}) {
        EXPECT_TRUE(run->engine().append(layer, run->view(drawn, kBatch)).is_ok());
        for (int64_t part = 0; part < kBatch; ++part)
          run->engine().keeping().observe_chunk(layer, part, window);
      }
    }
  }

  /// A step of the other engine; of the first as often as it takes. Returns how often that was.
  int64_t step(int64_t layer, ReadFaults& faults) {
    const Tokens drawn = one_.draw_tokens(kBatch, 1);
    const std::vector<float> query = one_.draw_query(kBatch, 1);
    for (EngineRun* run : {&one_, &other_}) {
      EXPECT_TRUE(run->engine().append(layer, run->view(drawn, kBatch)).is_ok());
    }
    std::vector<std::byte> expected;
    EXPECT_TRUE(other_.attend(layer, query, 1, expected).is_ok());
    std::vector<std::byte> output;
    for (int64_t tries = 1;; ++tries) {
      const double kept = tokens_kept(one_.engine());
      const Status attended = one_.attend(layer, query, 1, output);
      if (attended.is_ok()) {
        EXPECT_EQ(output, expected);
        return tries;
      }
      EXPECT_EQ(attended.code(), StatusCode::kStorage) << attended.message();
      EXPECT_GE(tokens_kept(one_.engine()), kept) << "a sequence's old set stays";
      faults = {};
    }
  }
  EngineRun& one() { return one_; }
  EngineRun& other() { return other_; }

 private:
  void set_projections(const EngineOptions& options, int64_t layer) {
    if (options.ranks.empty()) return;
    const int64_t rank = options.ranks[layer];
    const int64_t count = options.kv_heads * options.head_dim * rank;
    const std::vector<float> keys = one_.numbers(count, 2);
    const std::vector<float> queries = one_.numbers(count, 2);
    for (EngineRun* run : {&one_, &other_}) {
      EXPECT_TRUE(run->engine().set_projection(layer, rank, keys.data(), queries.data()).is_ok());
    }
  }

  EngineRun one_;
  EngineRun other_;
};

EngineOptions disk_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keep_scores = "disk";
  return options;
}

EngineOptions shared_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keep_share = "auto";
  options.groups_max = 12;
  options.pages_max = 24;
  return options;
}

EngineOptions joining_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "arkv";
  options.keep_interval = 0;
  options.keep_variance = 263.8;
  return options;
}

EngineOptions mixed_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = joining_options(directory, rows);
  options.keep_ratio = 0.3;
  return options;
}

EngineOptions divided_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "cake";
  options.keep_interval = 0;
  options.keep_variance = 200.0;
  return options;
}

EngineOptions outlier_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "outliers";
  options.keep_interval = 0;
  options.keep_window = Settings().keep_window;
  options.keep_tokens = 12;
  return options;
}

using MakeOptions = EngineOptions (*)(const std::string&, const std::string&);

/// Turns of each layer and sequence in 8 steps, whatever read fails; on a device too, where one is
/// given.
void expect_right_after_faults(MakeOptions made, const std::string& rows, uint64_t turns,
                               double kept, uint64_t reads = 60,
                               const std::optional<DeviceKind>& device = std::nullopt) {
  int64_t failures = 0;
  for (uint64_t read = 1; read <= reads && !testing::Test::HasFailure(); read += kEvery) {
    SCOPED_TRACE(read);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = made(directory.path(), rows);
    const EngineOptions undisturbed = options;
    options.merge_bytes_max = 4096;
    options.merge_gap_bytes = 0;
    options.device = device;
    options.wrap_reader = [&](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    Pair pair(options, undisturbed);
    faults = {};
    faults.fail_read = read;
    for (int64_t step = 0; step < 8; ++step) {
      for (const int64_t layer : {0, 1}) failures += pair.step(layer, faults) - 1;
    }
    EXPECT_EQ(pair.one().engine().parts().counters.turns, turns * kBatch * 2) << "of two layers";
    EXPECT_EQ(tokens_kept(pair.one().engine()), kept);
    EXPECT_EQ(tokens_kept(pair.other().engine()), kept);
  }
  EXPECT_GT(failures, static_cast<int64_t>(std::min<uint64_t>(50, reads - 10) / kEvery));
}

TEST(Keeping, ATurnThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(keeping_options, "box", 2, 10);
}

TEST(Keeping, AWalkOverAllThatIsOnDiskThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(disk_options, "none", 2, 10, 150);
}

TEST(Keeping, ATurnOfAllLayersThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(divided_options, "none", 1, 10);
}

TEST(Keeping, AWalkForOutliersThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(outlier_options, "mean", 1, 12);
}

TEST(Keeping, ATurnThatDecidesHowManyStayIsMadeAgainAndRight) {
  // Whole groups of the 10 there is room for.
  expect_right_after_faults(shared_options, "box", 2, 8);
}

TEST(Joining, ATurnThatFailsIsMadeAgainAndRight) {
  expect_right_after_faults(joining_options, "box", 3, 10);
  // 3 of 10 in the model's dtype, and in e4m3 4, then 5 in the room of 1 and 2; and a group of 4.
  expect_right_after_faults(mixed_options, "box", 3, 12);
}

TEST(Keeping, ATurnOnADeviceThatFailsIsMadeAgainAndRight) {
  const DeviceKind device = host_device({.delay_us_max = 20});
  expect_right_after_faults(keeping_options, "box", 2, 10, 20, device);
  expect_right_after_faults(disk_options, "none", 2, 10, 20, device);
  expect_right_after_faults(shared_options, "box", 2, 8, 20, device);
  expect_right_after_faults(joining_options, "box", 3, 10, 20, device);
  expect_right_after_faults(mixed_options, "box", 3, 12, 20, device);
}

EngineOptions heavy_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "heavy";
  return options;
}

EngineOptions rounded(EngineOptions options) {
  options.records = "fp8";
  options.group_tokens = 8;
  options.head_dim = 64;
  return options;
}

/// The bytes of an engine on a device are those of one on the host, whichever stream is far behind.
void expect_device_keeps_as_host(const EngineOptions& options) {
  for (const Stream slow : {Stream::kCompute, Stream::kLoad, Stream::kWrite}) {
    EngineOptions on_device = options;
    on_device.device = host_device({.slow = slow, .slow_us = 200});
    ReadFaults faults;
    Pair pair(on_device, options);
    for (int64_t step = 0; step < 25; ++step) {
      for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
    }
    EXPECT_GT(tokens_kept(pair.one().engine()), 0);
    EXPECT_EQ(tokens_kept(pair.one().engine()), tokens_kept(pair.other().engine()));
    for (EngineRun* run : {&pair.one(), &pair.other()}) {
      ASSERT_TRUE(run->engine().crop(160).is_ok());
      const int64_t order[] = {1, 0};
      ASSERT_TRUE(run->engine().select_sequences(order).is_ok());
    }
    for (int64_t step = 0; step < 12; ++step) {
      for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
    }
    EXPECT_EQ(pair.one().engine().parts().counters.turns,
              pair.other().engine().parts().counters.turns);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Keeping, IsTheSameOnADevice) {
  const TestDirectory directory;
  for (const std::string rows : {"box", "none"}) {
    for (const MakeOptions made :
         {keeping_options, heavy_options, disk_options, joining_options, mixed_options}) {
      const EngineOptions options = made(directory.path(), rows);
      SCOPED_TRACE(rows + " " + options.keeper + " " + options.keep_scores);
      expect_device_keeps_as_host(options);
      expect_device_keeps_as_host(rounded(options));
    }
  }
  expect_device_keeps_as_host(shared_options(directory.path(), "box"));
}

TEST(Keeping, TheNewestStayOnADevice) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.rows = "none";
  options.ranks.clear();
  options.keeper = "newest";
  options.device = host_device({});
  EXPECT_TRUE(options.validate().is_ok()) << options.validate().message();
}

/// A selector on the device leaves out what is kept, as the host's does.
TEST(Keeping, ADevicesOwnSelectorLeavesOutWhatIsKept) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.tail_tokens = 4;
  options.keeper = "heavy";
  options.keep_tokens = 24;
  options.keep_interval = 3;
  options.keep_window = kWindow;
  expect_device_keeps_as_host(options);
}

TEST(Joining, WhatLeavesTheTailIsKeptUntilThereIsNoRoomAndNothingIsRead) {
  const TestDirectory directory;
  EngineOptions options = joining_options(directory.path(), "none");
  options.keep_tokens = 20;
  ReadFaults faults;
  Pair pair(options, options);
  const EngineParts& parts = pair.one().engine().parts();
  std::vector<double> kept;
  std::vector<uint64_t> turns;
  uint64_t read = 0;
  for (int64_t step = 0; step < 24; ++step) {
    pair.step(0, faults);
    if (step == 0) read = parts.fetcher->reader().counters().bytes;
    if (step % 4 != 0) continue;
    kept.push_back(2 * tokens_kept(pair.one().engine()));  // one of two layers keeps them
    turns.push_back(parts.counters.turns / kBatch);
    EXPECT_EQ(tokens_dropped(pair.one().engine()), (151 + step - 11 - kept.back()) / 2);
  }
  // Groups of 4 are sealed after the steps that make 152, 156 ... tokens of 151.
  EXPECT_EQ(kept, (std::vector<double>{20, 15 + 4, 14 + 4, 13 + 4, 12 + 4, 20}));
  EXPECT_EQ(turns, (std::vector<uint64_t>{1, 2, 3, 4, 5, 5}));
  EXPECT_EQ(parts.fetcher->reader().counters().bytes, read) << "kept tokens and the tail suffice";
  ASSERT_TRUE(pair.one().engine().crop(160).is_ok());
  EXPECT_LE(2 * tokens_kept(pair.one().engine()), 20);
  ASSERT_TRUE(pair.one().engine().crop(5).is_ok());
  EXPECT_EQ(tokens_kept(pair.one().engine()), 0);
}

TEST(Joining, AllThatIsDecodedStaysWhereThereIsRoom) {
  const TestDirectory directory;
  EngineOptions options = joining_options(directory.path(), "none");
  options.keep_tokens = 200;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 40; ++step) pair.step(0, faults);
  EXPECT_EQ(tokens_dropped(pair.one().engine()), 0.0);
  EXPECT_EQ(pair.one().engine().parts().counters.turns, 2u) << "after the prompt alone";
}

TEST(Keeping, NothingIsKeptWhileEverythingFits) {
  const TestDirectory directory;
  EngineOptions options = keeping_options(directory.path());
  options.groups_max = options.pages_max = 50;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 12; ++step) EXPECT_EQ(pair.step(0, faults), 1);
  EXPECT_EQ(pair.one().engine().parts().counters.turns, 0u);
  EXPECT_EQ(tokens_kept(pair.one().engine()), 0);
}

TEST(Keeping, WithoutRowsOnlyWhatIsKeptIsAttended) {
  const TestDirectory directory;
  EngineOptions options = keeping_options(directory.path(), "none");
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 8; ++step) pair.step(0, faults);
  EXPECT_EQ(pair.one().engine().parts().counters.groups_attended, 0u);
  EXPECT_EQ(tokens_kept(pair.one().engine()), 5) << "in one of two layers";
  options.keeper = "none";
  EXPECT_TRUE(options.is_exact(0));
}

void expect_counted(EngineOptions options) {
  const int64_t record_bytes = options.payload_bytes();
  options.kv_memory_bytes = 4 << 20;  // write buffers follow from it
  const MemoryNeed need = memory_need(options, record_bytes, kBatch, 200);
  const int64_t token_bytes = 2 * options.kv_heads * options.head_dim * 4;
  EXPECT_GE(need.kept, kBatch * options.layers * options.keep_tokens * token_bytes);
  options.max_batch = kBatch;
  options.max_context = 200;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 20; ++step) {
    for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
  }
  const Ledger& ledger = pair.one().engine().parts().ledger;
  EXPECT_EQ(ledger.used(Use::kKept), need.kept);
  EXPECT_LE(ledger.peak(), need.total());
  ASSERT_TRUE(pair.one().engine().reset().is_ok());
  EXPECT_EQ(tokens_kept(pair.one().engine()), 0);
  options.kv_memory_bytes = need.total() / 2;
  EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kBudget);
}

TEST(Keeping, CountsAgainstTheBudget) {
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

TEST(Keeping, CountsAgainstTheBudgetOnADevice) {
  const TestDirectory directory;
  for (const MakeOptions made : {keeping_options, disk_options, joining_options, mixed_options}) {
    EngineOptions options = made(directory.path(), "box");
    options.device = host_device({});
    expect_counted(options);
    options = rounded(options);
    expect_counted(options);
  }
}

TEST(Keeping, SharesNoGroupsWhereADeviceChooses) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.keeper = "observed";
  options.keep_tokens = 10;
  options.keep_share = "auto";
  options.device = host_device({});
  const Status refused = options.validate();
  EXPECT_NE(refused.message().find("keep_share must be 'fixed' where a device chooses"),
            std::string::npos);
}

TEST(Keeping, DropsNothingWherePagesAreADevices) {
  EngineOptions options = keeping_options("", "none");
  options.device = host_device({});
  const Status refused = options.check_place();
  EXPECT_NE(refused.message().find("directory must be given where pages are a device's"),
            std::string::npos);
}

TEST(Keeping, IsNotSaved) {
  const TestDirectory directory;
  EngineOptions options = keeping_options(directory.path());
  ReadFaults faults;
  Pair pair(options, options);
  const auto shared = pair.one().engine().saver().share();
  ASSERT_FALSE(shared.is_ok());
  EXPECT_NE(shared.status().message().find("keeper must be none or newest, got 'observed'"),
            std::string::npos);
}

}  // namespace
}  // namespace kvswap
