// How often a decoding step calls the runtime: what a step costs the host beside its own work.

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "device/cuda/cuda_device.h"
#include "device_tensors.h"
#include "engine/engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kLayers = 4;
constexpr int64_t kSteps = 3;

/// As a model drives it: each layer's records are chosen while the layer before computes.
void decode(EngineRun& run) {
  const int64_t batch = run.engine().batch();
  std::vector<std::byte> output;
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(run.give(layer, run.draw_tokens(batch, 1), batch).is_ok());
      if (layer + 1 < kLayers) {
        ASSERT_TRUE(run.ask(layer + 1, run.draw_query(batch, 1), 1).is_ok());
      }
      const Status attended = run.attend(layer, run.draw_query(batch, 1), 1, output);
      ASSERT_TRUE(attended.is_ok()) << attended.message();
    }
  }
}

/// Calls of one layer in one step, by name.
std::map<std::string, double> calls_per_layer_step(int64_t batch) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.layers = kLayers;
  options.ranks.assign(kLayers, 8);
  options.groups_max = 4;
  options.pages_max = 8;
  options.select_queries_max = 1;
  options.look_ahead = "trust";  // verify selects and plans twice
  options.device = cuda_device(0);
  const fake_cuda::Machine machine({.delay_us_max = 0});
  DeviceTensors tensors;
  EngineRun run(options, 1, nullptr, tensors);
  run.read(batch, 72);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(run.set_projection(layer).is_ok());
  }
  decode(run);  // room for what a step takes is made
  fake_cuda::count_calls();
  decode(run);
  EXPECT_GT(run.engine().context().counters.groups_loaded, 10u);
  std::map<std::string, double> calls;
  for (const auto& [name, count] : fake_cuda::calls()) {
    calls[name] = static_cast<double>(count) / static_cast<double>(kSteps * kLayers);
  }
  return calls;
}

/// Bounds are what is counted today: a change that lowers a number lowers them.
void expect_at_most(int64_t batch, double calls_max, double launches_max, double waits_max) {
  auto calls = calls_per_layer_step(batch);
  double all = 0;
  for (const auto& [name, count] : calls) {
    std::printf("batch %d: %-24s %6.2f\n", static_cast<int>(batch), name.c_str(), count);
    // It asks the thread and not the device.
    if (name != "cudaGetDevice") all += count;
  }
  std::printf("batch %d: %-24s %6.2f\n", static_cast<int>(batch), "all others", all);
  EXPECT_LE(all, calls_max);
  EXPECT_LE(calls["cudaLaunchKernel"], launches_max);
  EXPECT_LE(calls["cudaEventSynchronize"], waits_max);
  EXPECT_EQ(calls["pageable copies"], 0) << "CUDA stages each, or the host waits for it";
  EXPECT_EQ(calls["cudaMallocFromPoolAsync"], 0);
}

TEST(RuntimeCalls, OfALayersStepAreBounded) { expect_at_most(1, 26, 6.5, 2.5); }
TEST(RuntimeCalls, OfABatchAreLittleMore) { expect_at_most(4, 28, 6.5, 2.5); }

}  // namespace
}  // namespace kvswap
