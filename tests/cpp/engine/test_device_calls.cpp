// What a step asks of a device, counted.

#include "device/counting_device.h"
#include "device/host_device.h"
#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kLayers = 8;

struct CountedRun {
  explicit CountedRun(const char* look_ahead) : run(options_of(directory, look_ahead, &device), 5) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(run.set_projection(layer).is_ok());
    }
    run.forward(2, 301);
    for (int step = 0; step < 3; ++step) run.forward(2, 1);
  }
  static EngineOptions options_of(const TestDirectory& directory, const char* look_ahead,
                                  CountingDevice** device) {
    EngineOptions options = small_options(directory.path());
    options.layers = kLayers;
    options.look_ahead = look_ahead;
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

struct PerLayer {
  double records = 0;
  double synchronised = 0;
};

PerLayer counted_steps(const char* look_ahead) {
  CountedRun counted(look_ahead);
  counted.device->counts = {};
  constexpr int64_t kSteps = 8;
  for (int64_t step = 0; step < kSteps; ++step) counted.run.forward(2, 1);
  const CountingDevice::Counts& counts = counted.device->counts;
  const double layer_steps = kSteps * kLayers;
  return {counts.records / layer_steps, counts.synchronised / layer_steps};
}

/// Tables of eight layers fit a segment of their ring, so that a step leaves one or two.
TEST(DeviceCalls, AStepLeavesAFewSegmentsOfTables) {
  const PerLayer counts = counted_steps("trust");
  // With a segment for the tables of one kernel: 12.5 and 6.4.
  EXPECT_LT(counts.records, 9.5);
  EXPECT_LT(counts.synchronised, 4.5);
}

/// A prediction that only prefetches is one selection and one plan more.
TEST(DeviceCalls, APrefetchCostsLessThanAStep) {
  const PerLayer counts = counted_steps("verify");
  EXPECT_LT(counts.records, 13.5);
  EXPECT_LT(counts.synchronised, 6);
}

}  // namespace
}  // namespace kvswap
