// What a step asks of a device, counted.

#include "device/counting_device.h"
#include "device/host_device.h"
#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kLayers = 8;

struct CountedRun {
  CountedRun() : run(options_of(directory, &device), 5) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(run.set_projection(layer).is_ok());
    }
    run.forward(2, 301);
    for (int step = 0; step < 3; ++step) run.forward(2, 1);
  }
  static EngineOptions options_of(const TestDirectory& directory, CountingDevice** device) {
    EngineOptions options = small_options(directory.path());
    options.layers = kLayers;
    options.ranks.assign(kLayers, 5);
    options.groups_max = 40;
    options.pages_max = 60;
    DeviceKind kind = host_device({});
    kind.make = [device, make = kind.make]() -> Result<std::unique_ptr<Device>> {
      auto counted = std::make_unique<CountingDevice>(std::move(make().value()));
      *device = counted.get();
      return std::unique_ptr<Device>(std::move(counted));
    };
    options.device = kind;
    return options;
  }

  const TestDirectory directory;
  CountingDevice* device = nullptr;
  EngineRun run;
};

/// Tables of eight layers fit a segment of their ring, so that a step leaves one or two.
TEST(DeviceCalls, AStepLeavesAFewSegmentsOfTables) {
  CountedRun counted;
  counted.device->counts = {};
  constexpr int64_t kSteps = 8;
  for (int64_t step = 0; step < kSteps; ++step) counted.run.forward(2, 1);
  const CountingDevice::Counts& counts = counted.device->counts;
  const double layer_steps = kSteps * kLayers;
  // With a segment for the tables of one kernel: 12.5 and 6.4.
  EXPECT_LT(counts.records / layer_steps, 9.5);
  EXPECT_LT(counts.synchronised / layer_steps, 4.5);
}

}  // namespace
}  // namespace kvswap
