// Sequences are planned side by side, each over pages of its own: threads change nothing.

#include <thread>

#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kBatch = 8;

/// Every index on a thread of its own, in falling order.
void one_thread_each(int64_t count, int64_t,
                     const std::function<void(int64_t begin, int64_t end)>& body) {
  std::vector<std::thread> threads;
  for (int64_t i = count - 1; i >= 0; --i) threads.emplace_back([&body, i] { body(i, i + 1); });
  for (std::thread& thread : threads) thread.join();
}

struct Lived {
  std::vector<std::vector<int32_t>> chosen;
  std::vector<std::byte> outputs;
  uint64_t loaded = 0;
};

Lived live(const std::string& replacement, ParallelFor parallel) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.replacement = replacement;
  options.groups_max = 6;
  options.pages_max = 9;
  EngineRun run(options, 11, std::move(parallel));
  for (const int64_t layer : {0, 1}) EXPECT_TRUE(run.set_projection(layer).is_ok());
  run.forward(kBatch, 93);
  Lived lived;
  for (int step = 0; step < 12; ++step) {
    run.forward(kBatch, 1);
    const auto& chosen = run.engine().last_selection(1);
    lived.chosen.insert(lived.chosen.end(), chosen.begin(), chosen.end());
  }
  lived.outputs = run.outputs();
  lived.loaded = run.engine().context().counters.groups_loaded;
  return lived;
}

TEST(ParallelPlan, GivesWhatOneThreadGives) {
  for (const std::string replacement : {"fifo", "lru", "unused"}) {
    const Lived serial = live(replacement, nullptr);
    const Lived parallel = live(replacement, one_thread_each);
    EXPECT_GT(serial.loaded, 0u);
    EXPECT_EQ(parallel.loaded, serial.loaded) << replacement;
    EXPECT_EQ(parallel.chosen, serial.chosen) << replacement;
    EXPECT_EQ(parallel.outputs, serial.outputs) << replacement;
  }
}

}  // namespace
}  // namespace kvswap
