// Random lives of an engine against the plain reference that keeps everything in memory.

#include "device/host_device.h"
#include "engine_run.h"
#include "how_long.h"
#include "random_life.h"

namespace kvswap {
namespace {

enum class Place { kHost, kDevice };

class RandomLife : public testing::TestWithParam<std::tuple<Shape, Place>> {};

TEST_P(RandomLife, LosesNothingAndAttendsOverTheBest) {
  const auto& [shape, place] = GetParam();
  const TestDirectory directory;
  EngineOptions options = options_of(shape, directory.path());
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(lives(1, 4)); ++seed) {
    SCOPED_TRACE(seed);
    if (place == Place::kDevice) options.device = host_device({.delay_us_max = 100, .seed = seed});
    EngineRun run(options, seed);
    run.live(60, shape.batch_max);
    if (HasFatalFailure()) return;
  }
  EXPECT_TRUE(directory.is_empty());
}

class LongLife : public testing::TestWithParam<Place> {};

TEST_P(LongLife, CrossesTheChunksOfSummariesAndOfWrites) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  if (GetParam() == Place::kDevice) options.device = host_device({.delay_us_max = 100});
  options.groups_max = 20;
  options.pages_max = 30;
  options.kv_memory_bytes = 16 << 20;  // small write buffers: several runs a chunk
  EngineRun run(options, 11);
  run.live(30, 3, 900);
  EXPECT_GT(run.engine().context().counters.groups_loaded, 200u);
}

std::string place_name(Place place) { return place == Place::kHost ? "host" : "device"; }

std::string life_name(const testing::TestParamInfo<RandomLife::ParamType>& info) {
  const auto& [shape, place] = info.param;
  return std::string(shape.name) + "_" + place_name(place);
}

INSTANTIATE_TEST_SUITE_P(Places, LongLife, testing::Values(Place::kHost, Place::kDevice),
                         [](const auto& info) { return place_name(info.param); });

INSTANTIATE_TEST_SUITE_P(Shapes, RandomLife,
                         testing::Combine(testing::ValuesIn(kShapes),
                                          testing::Values(Place::kHost, Place::kDevice)),
                         life_name);

INSTANTIATE_TEST_SUITE_P(SharedPages, RandomLife,
                         testing::Combine(testing::ValuesIn(kSharedPages),
                                          testing::Values(Place::kHost, Place::kDevice)),
                         life_name);

INSTANTIATE_TEST_SUITE_P(NarrowValues, RandomLife,
                         testing::Combine(testing::ValuesIn(kNarrowValues),
                                          testing::Values(Place::kHost)),
                         life_name);

INSTANTIATE_TEST_SUITE_P(Int4, RandomLife,
                         testing::Combine(testing::ValuesIn(rounded_shapes("int4")),
                                          testing::Values(Place::kHost, Place::kDevice)),
                         life_name);

INSTANTIATE_TEST_SUITE_P(Float8, RandomLife,
                         testing::Combine(testing::ValuesIn(rounded_shapes("fp8")),
                                          testing::Values(Place::kHost, Place::kDevice)),
                         life_name);

}  // namespace
}  // namespace kvswap
