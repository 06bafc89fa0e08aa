// A device that has no room left: what stood there stays, or every call says that it does not.

#include <atomic>

#include "device/host_device.h"
#include "engine/backend/device_backend.h"
#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kMuch = 1 << 30;
constexpr int64_t kChunk = 37;

/// On a device, whose tables the next chunk outgrows.
struct FullTables {
  FullTables() : bytes_max(kMuch), run(options_of(directory, &bytes_max), 7) {
    for (const int64_t layer : {0, 1}) EXPECT_TRUE(run.set_projection(layer).is_ok());
    const EngineOptions& options = run.engine().context().options;
    while (options.sealed_groups(run.engine().positions(1) + kChunk) <=
           run.engine().context().plan.groups_unit) {
      run.forward(2, kChunk);
    }
    run.expect_context(run.engine().positions(1) + kChunk);
  }
  static EngineOptions options_of(const TestDirectory& directory,
                                  const std::atomic<int64_t>* bytes_max) {
    EngineOptions options = small_options(directory.path());
    options.device = host_device({.bytes_max = bytes_max});
    return options;
  }
  Status grow() { return run.give(0, run.draw_tokens(2, kChunk), 2); }
  int64_t device_bytes() {
    const MemoryBackend& space = *run.engine().context().space;
    return space.device_bytes() + space.pinned_bytes();
  }

  const TestDirectory directory;
  std::atomic<int64_t> bytes_max;
  EngineRun run;
};

TEST(DeviceRoom, WithoutRoomToGrowKeepsWhatItHasAndGoesOnWhenThereIsSome) {
  FullTables full;
  EngineRun& run = full.run;
  for (int again = 0; again < 3; ++again) {
    full.bytes_max = full.device_bytes();
    const Status refused = full.grow();
    ASSERT_EQ(refused.code(), StatusCode::kBudget);
    EXPECT_NE(refused.message().find("and refused"), std::string::npos) << refused.message();
    EXPECT_LE(full.device_bytes(), full.bytes_max);
  }
  full.bytes_max = kMuch;
  run.compare_contents();
  run.forward(2, 2 * kChunk);
  run.forward(2, 1);
  run.compare_contents();
}

TEST(DeviceRoom, WithoutRoomToGrowKeepsTheLanesThatReadsAreLandingIn) {
  FullTables full;
  EngineRun& run = full.run;
  const std::vector<float> query = run.draw_query(2, 1);
  ASSERT_TRUE(run.engine().begin_pass(Pass::kDecode).is_ok());
  ASSERT_TRUE(run.ask(1, query, 1).is_ok());
  full.bytes_max = full.device_bytes();
  Status refused;
  for (int64_t token = 0; token < 2 * kChunk && refused.is_ok(); ++token) {
    refused = run.give(0, run.draw_tokens(2, 1), 2);
  }
  ASSERT_EQ(refused.code(), StatusCode::kBudget) << refused.message();
  full.bytes_max = kMuch;
  std::vector<std::byte> output;
  EXPECT_TRUE(run.attend(1, query, 1, output).is_ok());
}

TEST(DeviceRoom, ThatLosesWhatItHadRefusesEveryCall) {
  FullTables full;
  full.bytes_max = 0;
  EXPECT_EQ(full.grow().code(), StatusCode::kBudget);
  full.bytes_max = kMuch;
  for (const Status& refused : {full.grow(), full.run.engine().crop(3)}) {
    EXPECT_EQ(refused.code(), StatusCode::kBudget) << refused.message();
  }
}

}  // namespace
}  // namespace kvswap
