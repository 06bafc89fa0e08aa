// Without a directory: no file, no thread, and what is dropped is gone.

#include "engine/report/engine_report.h"
#include "engine_run.h"
#include "io/syscalls.h"

namespace kvswap {
namespace {

EngineOptions dropping_options(const std::string& keeper = "newest") {
  EngineOptions options = small_options("");
  options.rows = "none";
  options.ranks.clear();
  options.head_dim = 64;
  options.keeper = keeper;
  options.groups_max = 1;
  return options;
}

/// Counts what would reach a file.
class CountingKernel final : public Syscalls {
 public:
  CountingKernel() { use_syscalls(this); }
  ~CountingKernel() override { use_syscalls(nullptr); }
  int open(const char* path, int flags, mode_t mode) override {
    ++calls;
    return Syscalls::open(path, flags, mode);
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset) override {
    ++calls;
    return Syscalls::pwrite(fd, data, bytes, offset);
  }
  int64_t preadv(int fd, const iovec* targets, int count, int64_t offset) override {
    ++calls;
    return Syscalls::preadv(fd, targets, count, offset);
  }
  int ring_setup(unsigned entries, io_uring* ring, unsigned flags) override {
    ++calls;
    return Syscalls::ring_setup(entries, ring, flags);
  }
  int calls = 0;
};

/// A prompt in both layers, as who attends it does.
void read_prompt(EngineRun& run, int64_t batch, int64_t tokens) {
  for (const int64_t layer : {0, 1}) {
    const Tokens drawn = run.draw_tokens(batch, tokens);
    ASSERT_TRUE(run.give(layer, drawn, batch).is_ok());
    run.engine().exact_chunks().end(layer, tokens);
  }
}

TEST(TokenEviction, TouchesNoFile) {
  CountingKernel kernel;
  {
    const EngineOptions options = dropping_options();
    EngineRun run(options, 3);
    read_prompt(run, 2, 200);
    for (int step = 0; step < 40; ++step) {
      for (const int64_t layer : {0, 1}) {
        const Tokens drawn = run.draw_tokens(2, 1);
        const std::vector<float> query = run.draw_query(2, 1);
        ASSERT_TRUE(run.give(layer, drawn, 2).is_ok());
        std::vector<std::byte> output;
        ASSERT_TRUE(run.attend(layer, query, 1, output).is_ok());
      }
    }
    EXPECT_GT(tokens_dropped(run.engine()), 200);
  }
  EXPECT_EQ(kernel.calls, 0);
}

TEST(TokenEviction, ALayersPromptIsLetGoOfBeforeTheNextComes) {
  EngineOptions options = dropping_options();
  EngineRun run(options, 3);
  const Ledger& ledger = run.engine().context().ledger;
  const int64_t record_bytes = run.engine().context().record_bytes();
  const int64_t prompt_bytes = 2 * 400 / options.group_tokens * record_bytes;
  const int64_t before = ledger.used(Use::kStaging);
  read_prompt(run, 2, 400);
  // Two steps of 4 queries and what is under way in a group.
  const int64_t waiting = 2 * 2 * 3 * record_bytes;
  EXPECT_LE(ledger.used(Use::kStaging) - before, waiting);
  EXPECT_LE(run.engine().context().store->bytes_held(), waiting);
  EXPECT_LE(ledger.peak() - ledger.total(), prompt_bytes + waiting);
  EXPECT_LE(run.engine().context().file->allocated_bytes(), 4 * (64 << 10));
  ASSERT_TRUE(run.engine().crop(0).is_ok());
  EXPECT_EQ(run.engine().context().store->bytes_held(), 0);
  EXPECT_EQ(run.engine().context().file->allocated_bytes(), 0);
  EXPECT_EQ(ledger.used(Use::kStaging), before);
}

TEST(TokenEviction, OneLayersPromptMustFitTheBudget) {
  EngineOptions options = dropping_options();
  options.max_batch = 1;
  options.max_context = 4000;
  const int64_t prompt_bytes =
      4000 / options.group_tokens * EngineRun(options, 1).engine().context().record_bytes();
  options.kv_memory_bytes = prompt_bytes;
  const auto refused = Engine::create(options, nullptr);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kBudget);
  options.kv_memory_bytes = prompt_bytes + (2 << 20);
  EXPECT_LT(options.kv_memory_bytes, 2 * prompt_bytes) << "of two layers";
  EngineRun run(options, 3);
  read_prompt(run, 1, 4000);
}

TEST(TokenEviction, WhatIsGoneIsSaidAndNothingChanges) {
  EngineRun run(dropping_options(), 3);
  read_prompt(run, 1, 200);
  Engine& engine = run.engine();
  EXPECT_EQ(engine.crop(100).code(), StatusCode::kDropped);
  std::vector<float> keys(2 * 10 * 64), values(2 * 10 * 64);
  EXPECT_EQ(engine.read_back(0, 0, 100, 110, keys.data(), values.data()).code(),
            StatusCode::kDropped);
  EXPECT_EQ(engine.positions(0), 200);
  EXPECT_TRUE(engine.read_back(0, 0, 190, 200, keys.data(), values.data()).is_ok());
  EXPECT_FALSE(engine.saver().share().is_ok());
  EXPECT_TRUE(engine.crop(196).is_ok()) << "a step may be taken back";
  EXPECT_EQ(engine.positions(1), 196);
}

TEST(TokenEviction, WhoKeepsEverythingNeedsADirectory) {
  EngineOptions retained = dropping_options();
  retained.keeper = "none";
  EngineOptions exact = dropping_options();
  exact.exact_layers = {0};
  for (const EngineOptions& options : {small_options(""), retained, exact}) {
    const auto refused = Engine::create(options, nullptr);
    ASSERT_FALSE(refused.is_ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalid);
    EXPECT_NE(refused.status().message().find("directory"), std::string::npos);
  }
}

TEST(TokenEviction, RefusesWhatIsOfADisk) {
  const auto told = [](EngineOptions options) { return options.check_place().message(); };
  EngineOptions options = dropping_options();
  EXPECT_EQ(told(options), "");
  options.device_model = "emmc";
  EXPECT_NE(told(options).find("storage.simulated_device must be left out"), std::string::npos);
  options = dropping_options();
  options.disk_quota_bytes = 1 << 20;
  EXPECT_NE(told(options).find("storage.max_disk_bytes must be left out"), std::string::npos);
  options.directory = "/tmp";
  EXPECT_EQ(told(options), "");
}

}  // namespace
}  // namespace kvswap
