#include <cstring>

#include "device/host_device.h"
#include "engine/prefill/prefix_stream.h"
#include "engine_run.h"
#include "io/fault_injection.h"

namespace kvswap {
namespace {

/// A long past in blocks of a few records each, so that several are under way.
EngineOptions streaming_options(const std::string& directory) {
  EngineOptions options = small_options(directory);
  options.kv_memory_bytes = 8 << 20;  // small blocks
  return options;
}

/// The same, in a budget whose reuse buffers hold larger blocks than staging does.
EngineOptions lending_options(const std::string& directory) {
  EngineOptions options = streaming_options(directory);
  options.head_dim = 64;
  options.pages_max = 64;
  return options;
}

void expect_every_group_in_order(EngineRun& run, bool with_room = true) {
  Engine& engine = run.engine();
  const int64_t sealed = engine.sequences().layer(1).sealed_groups;
  for (const int64_t first : {int64_t{0}, int64_t{7}, sealed - 1, sealed}) {
    auto stream = engine.exact_chunks().stream({1, 1, first, sealed - first}, with_room);
    ASSERT_TRUE(stream.is_ok()) << stream.status().message();
    int64_t group = first;
    while (true) {
      const auto block = stream.value()->next();
      ASSERT_TRUE(block.is_ok()) << block.status().message();
      if (block.value().groups == 0) break;
      ASSERT_EQ(block.value().first_group, group);
      for (int64_t i = 0; i < block.value().groups; ++i, ++group) {
        ASSERT_TRUE(engine.context().store->verify(
            1, 1, group, block.value().records + i * engine.context().record_bytes()));
      }
    }
    EXPECT_EQ(group, sealed);
  }
}

TEST(PrefixStream, GivesEveryGroupOnceAndInOrder) {
  const TestDirectory directory;
  EngineRun run(streaming_options(directory.path()), 6);
  run.forward(2, 900);
  expect_every_group_in_order(run);
  Engine& engine = run.engine();
  const int64_t sealed = engine.sequences().layer(1).sealed_groups;
  auto left_early = engine.exact_chunks().stream({0, 0, 0, sealed}, true);
  ASSERT_TRUE(left_early.is_ok());
  ASSERT_TRUE(left_early.value()->next().is_ok());
  left_early.value().reset();
  run.compare_contents();
}

TEST(PrefixStream, BuffersOfADeviceAreLarger) {
  EngineOptions options = small_options(".");
  const int64_t record_bytes = options.page_bytes();
  const auto buffer_bytes = [&](int64_t budget) {
    options.kv_memory_bytes = budget;
    return Plan(options, record_bytes).write_buffer_bytes;
  };
  EXPECT_EQ(buffer_bytes(-1), 1 << 20);
  EXPECT_EQ(buffer_bytes(int64_t{4} << 30), 1 << 20);
  options.device = host_device({});
  EXPECT_EQ(buffer_bytes(-1), 16 << 20);
  EXPECT_EQ(buffer_bytes(int64_t{2} << 30), 8 << 20);
  EXPECT_EQ(buffer_bytes(int64_t{8} << 30), 16 << 20);
  const Plan plan(options, record_bytes);
  EXPECT_EQ(plan.past_block_groups * options.group_tokens, 2048);
}

TEST(PrefixStream, InASmallBudgetGoesThroughTheReuseBuffers) {
  const TestDirectory directory;
  EngineRun run(lending_options(directory.path()), 6);
  run.forward(2, 900);
  for (int refresh = 0; refresh < 3; ++refresh) {
    run.forward(2, 1);  // fills them with what it chose
    expect_every_group_in_order(run);
    const int64_t sealed = run.engine().sequences().layer(0).sealed_groups;
    auto stream = run.engine().exact_chunks().stream({0, 1, 0, sealed}, true);
    ASSERT_TRUE(stream.is_ok()) << stream.status().message();
    const auto block = stream.value()->next();
    ASSERT_TRUE(block.is_ok()) << block.status().message();
    const EngineContext& parts = run.engine().context();
    EXPECT_EQ(block.value().groups, parts.options.layers * parts.options.pages_max / 3);
    EXPECT_GT(block.value().groups, parts.plan.past_block_groups);
    ASSERT_NE(block.value().room, nullptr);
    std::memset(block.value().room, 0xff, block.value().groups * parts.record_bytes());
  }
  expect_every_group_in_order(run, false);
  const int64_t sealed = run.engine().sequences().layer(0).sealed_groups;
  auto without = run.engine().exact_chunks().stream({0, 1, 0, sealed}, false);
  ASSERT_TRUE(without.is_ok()) << without.status().message();
  const auto larger = without.value()->next();
  ASSERT_TRUE(larger.is_ok()) << larger.status().message();
  const EngineOptions& options = run.engine().context().options;
  EXPECT_EQ(larger.value().groups, options.layers * options.pages_max / 2);
  EXPECT_EQ(larger.value().room, nullptr);
  without.value().reset();
  for (int step = 0; step < 4; ++step) run.forward(2, 1);
  run.compare_contents();
}

void expect_a_failed_read_is_an_error(EngineOptions options) {
  ReadFaults faults;
  options.wrap_reader = [&faults](std::unique_ptr<BlockReader> inner) {
    return std::make_unique<FaultyReader>(std::move(inner), &faults);
  };
  EngineRun run(options, 6);
  run.forward(1, 900);
  const int64_t sealed = run.engine().sequences().layer(0).sealed_groups;
  for (uint64_t read = 1; read <= 4; ++read) {
    faults = {};
    faults.fail_read = read;
    Status status;
    for (int refresh = 0; refresh < 2; ++refresh) {
      status = {};
      auto stream = run.engine().exact_chunks().stream({0, 0, 0, sealed}, true);
      if (!stream.is_ok()) status = stream.status();
      for (int64_t groups = 1; status.is_ok() && groups > 0;) {
        const auto block = stream.value()->next();
        status = block.status();
        if (block.is_ok()) groups = block.value().groups;
      }
      EXPECT_EQ(status.code(), refresh == 0 ? StatusCode::kStorage : StatusCode::kOk);
    }
  }
}

TEST(PrefixStream, AFailedReadIsAnErrorAndTheNextStreamIsRight) {
  const TestDirectory directory;
  expect_a_failed_read_is_an_error(streaming_options(directory.path()));
  expect_a_failed_read_is_an_error(lending_options(directory.path()));
}

}  // namespace
}  // namespace kvswap
