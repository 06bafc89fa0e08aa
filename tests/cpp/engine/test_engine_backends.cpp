// The same life over every way of reading, landing and computing gives the same bits.

#include <thread>

#include "device/host_device.h"
#include "engine_run.h"

namespace kvswap {
namespace {

/// Splits work over threads as torch's pool does: pieces in any order, the caller takes one.
void threaded_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t pieces = std::min<int64_t>(3, (count + grain - 1) / grain);
  std::vector<std::thread> threads;
  for (int64_t piece = 1; piece < pieces; ++piece) {
    threads.emplace_back(body, count * piece / pieces, count * (piece + 1) / pieces);
  }
  if (count > 0) body(0, count / std::max<int64_t>(pieces, 1));
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::byte> live(EngineOptions options, ParallelFor parallel, std::string* reader) {
  EngineRun run(options, 5, std::move(parallel));
  run.live(50, 3);
  *reader = run.engine().context().fetcher->reader().name();
  const EngineCounters& counters = run.engine().context().counters;
  EXPECT_GT(counters.groups_loaded + counters.groups_prefetched, 100u);
  return run.outputs();
}

enum class Place { kHost, kDevice };

class Backends : public testing::TestWithParam<std::tuple<const char*, const char*, Place>> {};

TEST_P(Backends, GiveTheSameBits) {
  const TestDirectory directory;
  std::string reader;
  EngineOptions options = small_options(directory.path());
  options.reader = "sync";
  const std::vector<std::byte> expected = live(options, nullptr, &reader);
  ASSERT_EQ(reader, "sync");

  Place place;
  std::tie(options.reader, options.io_mode, place) = GetParam();
  if (place == Place::kDevice) options.device = host_device({.delay_us_max = 100});
  if (options.reader == "uring") options.reader = "auto";  // falls back where there is no io_uring
  options.read_depth = 7;
  EXPECT_TRUE(live(options, nullptr, &reader) == expected) << reader;
  options.merge_gap_bytes = 0;
  EXPECT_TRUE(live(options, threaded_for, &reader) == expected) << reader << ", threads compute";
  EXPECT_TRUE(directory.is_empty());
}

INSTANTIATE_TEST_SUITE_P(All, Backends,
                         testing::Combine(testing::Values("sync", "threads", "uring"),
                                          testing::Values("auto", "buffered"),
                                          testing::Values(Place::kHost, Place::kDevice)));

TEST(Backends, AModelledDeviceGivesTheSameBits) {
  const TestDirectory directory;
  std::string reader;
  EngineOptions options = small_options(directory.path());
  const std::vector<std::byte> expected = live(options, nullptr, &reader);
  options.device_model = "ufs";
  EXPECT_TRUE(live(options, nullptr, &reader) == expected);
  EXPECT_NE(reader.find("ufs("), std::string::npos) << reader;
}

TEST(Backends, SharedPagesGiveTheSameBitsThroughEveryReader) {
  const TestDirectory directory;
  std::string reader;
  EngineOptions options = small_options(directory.path());
  options.layers = 5;
  options.ranks = {5, 8, 6, 5, 7};
  options.reader = "sync";
  const std::vector<std::byte> expected = live(options, nullptr, &reader);
  options.resident_layers = 2;
  for (const char* kind : {"sync", "threads", "auto"}) {
    for (const auto& place : {std::optional<DeviceKind>(), std::optional(host_device({}))}) {
      options.reader = kind;
      options.device = place;
      EXPECT_TRUE(live(options, threaded_for, &reader) == expected) << reader;
    }
  }
}

TEST(Backends, EncodedRecordsGiveTheSameBitsThroughEveryReader) {
  for (const char* records : {"fp8", "int4"}) {
    const TestDirectory directory;
    std::string reader;
    EngineOptions options = small_options(directory.path());
    options.head_dim *= 4;
    options.records = records;
    options.reader = "sync";
    const std::vector<std::byte> expected = live(options, nullptr, &reader);
    for (const char* kind : {"sync", "threads", "auto"}) {
      for (const char* mode : {"auto", "buffered"}) {
        options.reader = kind;
        options.io_mode = mode;
        EXPECT_TRUE(live(options, threaded_for, &reader) == expected) << reader << " " << mode;
      }
    }
  }
}

TEST(Backends, WithoutChecksumsTheBitsAreTheSameAndTheRiskIsSaid) {
  const TestDirectory directory;
  std::string reader;
  EngineOptions options = small_options(directory.path());
  const std::vector<std::byte> expected = live(options, nullptr, &reader);
  options.checksum = false;
  EXPECT_TRUE(live(options, nullptr, &reader) == expected);
  EngineRun run(options, 5);
  const std::vector<std::string>& told = run.engine().context().fallbacks;
  EXPECT_TRUE(std::ranges::any_of(
      told, [](const std::string& each) { return each.starts_with("Checksums are off"); }));
}

}  // namespace
}  // namespace kvswap
