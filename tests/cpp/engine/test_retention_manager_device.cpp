// The same on a device: what is kept is the host's, and right whatever fails.

#include "keeping_run.h"

namespace kvswap {
namespace {

TEST(RetentionManager, ATurnOnADeviceThatFailsIsMadeAgainAndRight) {
  const DeviceKind device = host_device({.delay_us_max = 20});
  expect_right_after_faults(keeping_options, "box", 2 * kParts, 10, 20, device);
  expect_right_after_faults(disk_options, "none", 2 * kParts + 1, 10, 20, device);
  expect_right_after_faults(shared_options, "box", 2 * kParts, 8, 20, device);
  expect_right_after_faults(outlier_options, "mean", kParts, 12, 20, device);
  expect_right_after_faults(joining_options, "box", 3 * kParts, 10, 20, device);
  expect_right_after_faults(mixed_options, "box", 3 * kParts, 12, 20, device);
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

/// The bytes of an engine on a device are those of one on the host, whichever stream is far behind:
/// one stream after the other, and all of them in `make test-long`.
void expect_device_keeps_as_host(const EngineOptions& options) {
  static int number = 0;
  const Stream streams[] = {Stream::kCompute, Stream::kLoad, Stream::kWrite};
  const Stream next = streams[number++ % 3];
  for (const Stream slow : streams) {
    if (slow != next && !is_long()) continue;
    EngineOptions on_device = options;
    on_device.device = host_device({.slow = slow, .slow_us = 200});
    ReadFaults faults;
    Pair pair(on_device, options);
    for (int64_t step = 0; step < 25; ++step) {
      for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
    }
    EXPECT_GT(tokens_retained(pair.one().engine()), 0);
    EXPECT_EQ(tokens_retained(pair.one().engine()), tokens_retained(pair.other().engine()));
    for (EngineRun* run : {&pair.one(), &pair.other()}) {
      ASSERT_TRUE(run->engine().crop(160).is_ok());
      const int64_t order[] = {1, 0};
      ASSERT_TRUE(run->engine().select_sequences(order).is_ok());
    }
    for (int64_t step = 0; step < 12; ++step) {
      for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
    }
    EXPECT_EQ(pair.one().engine().context().counters.refreshes,
              pair.other().engine().context().counters.refreshes);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RetentionManager, IsTheSameOnADevice) {
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
  expect_device_keeps_as_host(outlier_options(directory.path(), "mean"));
}

TEST(RetentionManager, TheNewestStayOnADevice) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.rows = "none";
  options.ranks.clear();
  options.keeper = "newest";
  options.device = host_device({});
  EXPECT_TRUE(options.validate().is_ok()) << options.validate().message();
}

/// Groups are scored by projections, which a device's own selector does.
EngineOptions projecting_options(const std::string& directory, const std::string& keeper,
                                 int64_t tokens) {
  EngineOptions options = small_options(directory);
  options.tail_tokens = 4;
  options.keeper = keeper;
  options.keep_tokens = tokens;
  options.keep_interval = 3;
  options.keep_window = kWindow;
  return options;
}

/// A selector on the device leaves out what is kept, as the host's does.
TEST(RetentionManager, ADevicesOwnSelectorLeavesOutWhatIsRetained) {
  const TestDirectory directory;
  expect_device_keeps_as_host(projecting_options(directory.path(), "heavy", 24));
}

TEST(RetentionManager, CountsAgainstTheBudgetOnADevice) {
  const TestDirectory directory;
  for (const MakeOptions made : {keeping_options, disk_options, joining_options, mixed_options}) {
    EngineOptions options = made(directory.path(), "box");
    options.device = host_device({});
    expect_counted(options);
    options = rounded(options);
    expect_counted(options);
  }
}

TEST(RetentionManager, ADevicesOwnSelectorChoosesSoManyFewerAsStay) {
  const TestDirectory directory;
  for (const std::string score : {"sum", "mass"}) {
    EngineOptions options = projecting_options(directory.path(), "observed", 40);
    options.keep_share = "auto";
    options.score = score;
    options.groups_max = 12;
    options.pages_max = 24;
    expect_device_keeps_as_host(options);
    options.device = host_device({});
    expect_counted(options);
  }
}

TEST(RetentionManager, DropsNothingWherePagesAreADevices) {
  EngineOptions options = keeping_options("", "none");
  options.device = host_device({});
  const Status refused = options.check_place();
  EXPECT_NE(refused.message().find("directory must be given where pages are a device's"),
            std::string::npos);
}

}  // namespace
}  // namespace kvswap
