// The real CudaDevice and the engine over it, with every kernel: random lives, as on the host.

#include <memory>

#include "device/cuda/cuda_device.h"
#include "device_tensors.h"
#include "engine/engine_run.h"
#include "engine/random_life.h"
#include "engine/saved_engine.h"
#include "how_long.h"

namespace kvswap {
namespace {

int64_t steps() { return is_long() ? 60 : KVSWAP_CPU_IS_EMULATED ? 5 : 12; }

EngineOptions on_cuda(EngineOptions options) {
  options.device = cuda_device(0);
  const int64_t unit = options.device->head_dim_unit;
  options.head_dim = (options.head_dim + unit - 1) / unit * unit;
  return options;
}

class CudaLife : public testing::TestWithParam<Shape> {};

TEST_P(CudaLife, LosesNothingAndAttendsOverTheBest) {
  const TestDirectory directory;
  const EngineOptions options = on_cuda(options_of(GetParam(), directory.path()));
  for (int64_t seed = 1; seed <= lives(1, 4); ++seed) {
    SCOPED_TRACE(seed);
    const fake_cuda::Machine machine({.seed = static_cast<uint64_t>(seed)});
    {
      DeviceTensors tensors;
      EngineRun run(options, seed, nullptr, tensors);
      run.live(steps(), GetParam().batch_max);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(fake_cuda::left(), fake_cuda::Left());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  EXPECT_TRUE(directory.is_empty());
}

std::string name_of(const testing::TestParamInfo<Shape>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Shapes, CudaLife, testing::ValuesIn(kShapes), name_of);
INSTANTIATE_TEST_SUITE_P(SharedPages, CudaLife, testing::ValuesIn(kSharedPages), name_of);
INSTANTIATE_TEST_SUITE_P(Float8, CudaLife, testing::ValuesIn(rounded_shapes("fp8")), name_of);
INSTANTIATE_TEST_SUITE_P(Int4, CudaLife, testing::ValuesIn(rounded_shapes("int4")), name_of);

class CudaEngine : public testing::Test {
 protected:
  ~CudaEngine() override {
    EXPECT_EQ(fake_cuda::left(), fake_cuda::Left());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  const TestDirectory directory_;
  const fake_cuda::Machine machine_;
};

TEST_F(CudaEngine, CrossesTheChunksOfSummariesAndOfWrites) {
  EngineOptions options = on_cuda(small_options(directory_.path()));
  options.groups_max = 20;
  options.pages_max = 30;
  options.kv_memory_bytes = 16 << 20;  // small write buffers: several runs a chunk
  DeviceTensors tensors;
  EngineRun run(options, 11, nullptr, tensors);
  run.live(is_long() ? 30 : 8, 3, 900);
  EXPECT_GT(run.engine().context().counters.groups_loaded, 200u);
}

TEST_F(CudaEngine, IsSavedAndGoesOnAsItWould) {
  const EngineOptions options = on_cuda(small_options(directory_.path()));
  for (int64_t seed = 0; seed < lives(1, 6); ++seed) {
    SCOPED_TRACE(seed);
    DeviceTensors tensors;
    EngineRun run(options, seed, nullptr, tensors);
    run.live(12, 3);
    while (run.engine().positions(0) < 20) {
      run.forward(std::max<int64_t>(1, run.engine().batch()), 30);
    }
    SavedInMemory saved(directory_.path());
    const Status status = run.engine().saver().save(saved);
    ASSERT_TRUE(status.is_ok()) << status.message();
    run.compare_contents();
    auto opened = saved.open(options);
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    auto first = run.go_on_with(std::move(opened.value()));
    run.compare_state();
    run.compare_contents();
    run.live(15, 3);
    first = run.go_on_with(fork_of(run.engine()));
    run.compare_contents();
    run.live(10, 3);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kvswap
