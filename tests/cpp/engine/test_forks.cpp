// Forks share what is summarised, in memory and in the account, until they differ.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/report/engine_report.h"
#include "engine_run.h"
#include "saved_engine.h"

namespace kvswap {
namespace {

/// A session of one sequence whose layers have projections and 2,500 tokens: summaries of three
/// chunks.
std::unique_ptr<EngineRun> long_run(const EngineOptions& options, int64_t tokens = 2500) {
  auto run = std::make_unique<EngineRun>(options, 3);
  const Tokens drawn = run->draw_tokens(1, tokens);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    EXPECT_TRUE(run->give(layer, drawn, 1).is_ok());
    EXPECT_TRUE(run->set_projection(layer).is_ok());
  }
  return run;
}

TEST(Forks, AnswerAlikeAndCountOnceWhatTheyShareWhicheverGoesFirst) {
  TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  std::vector<int64_t> order = {0, 1, 2};
  const int64_t positions[] = {2500, 1500, 1024};  // the last two go back into what they share
  std::vector<std::byte> expected[3];
  {
    auto run = long_run(options);
    SavedInMemory saved(directory.path());
    ASSERT_TRUE(run->engine().saver().save(saved).is_ok());
    options.kv_memory_bytes =
        memory_need(options, run->engine().context().record_bytes(), 1, 2600).total();
    for (int i = 0; i < 3; ++i) {
      auto opened = saved.open(options);
      ASSERT_TRUE(opened.is_ok()) << opened.status().message();
      ASSERT_TRUE(opened.value()->crop(positions[i]).is_ok());
      expected[i] = answers(*opened.value(), 7);
    }
  }
  do {
    SCOPED_TRACE(testing::PrintToString(order));
    auto run = long_run(options);
    std::unique_ptr<Engine> engines[3];
    engines[1] = fork_of(run->engine());
    engines[2] = fork_of(*engines[1]);
    engines[0] = run->go_on_with(nullptr);
    const int64_t whole = engine_ledger(*engines[0]).at("summary");
    EXPECT_GT(whole, 2 * 2500 * 5 * 4);
    std::vector<int> left = {0, 1, 2};
    for (const int64_t next : order) {
      for (const int each : left) {
        auto ledger = engine_ledger(*engines[each]);
        EXPECT_EQ(ledger.at("summary"), each == left.front() ? whole : 0);
        EXPECT_EQ(ledger.at("shared"), each == left.front() ? 0 : whole);
        EXPECT_LE(ledger.at("total") + ledger.at("shared"), options.kv_memory_bytes);
      }
      // It goes its own way in the budget that it would have alone, and the others stay.
      std::unique_ptr<Engine> once = left.size() > 1 ? fork_of(*engines[next]) : nullptr;
      ASSERT_TRUE(engines[next]->crop(positions[next]).is_ok());
      EXPECT_TRUE(answers(*engines[next], 7) == expected[next]);
      EXPECT_EQ(engine_ledger(*engines[next]).at("limit"), options.kv_memory_bytes);
      once.reset();
      engines[next].reset();
      std::erase(left, next);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Forks, MayGoOnInOtherThreads) {
  TestDirectory directory;
  auto run = long_run(small_options(directory.path()));
  std::unique_ptr<Engine> fork = fork_of(run->engine());
  const std::unique_ptr<Engine> last = fork_of(*fork);
  std::unique_ptr<Engine> first = run->go_on_with(nullptr);
  const auto goes_on_and_back = [](std::unique_ptr<Engine> engine) {
    std::vector<std::byte> all = answers(*engine, 7);
    EXPECT_TRUE(engine->crop(1500).is_ok());
    const std::vector<std::byte> more = answers(*engine, 8);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  auto other = std::async(std::launch::async, goes_on_and_back, std::move(fork));
  EXPECT_TRUE(goes_on_and_back(std::move(first)) == other.get());
  EXPECT_EQ(engine_ledger(*last).at("shared"), 0) << "it is alone";
}

TEST(Forks, OfForksEndInAnErrorThatSaysHowToGoOn) {
  TestDirectory directory;
  auto run = long_run(small_options(directory.path()), 100);
  std::unique_ptr<Engine> newest = run->go_on_with(nullptr);
  int64_t forks = 0;
  for (; forks < 2 * LayeredFile::kFilesMax; ++forks) {
    (void)answers(*newest, 7);  // adds records, in a file of its own
    const auto shared = newest->saver().share();
    if (!shared.is_ok()) {
      EXPECT_NE(shared.status().message().find("save() it"), std::string::npos);
      break;
    }
    newest = fork_of(*newest);
  }
  EXPECT_EQ(forks, LayeredFile::kFilesMax - 1);
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(newest->saver().save(saved).is_ok());
  auto opened = saved.open(newest->options());
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_TRUE(answers(*opened.value(), 8) == answers(*newest, 8));
  EXPECT_TRUE(opened.value()->saver().share().is_ok());
}

/// Of this process; without files.
int64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
  }
  return 0;
}

TEST(Forks, TakeTheMemoryOfWhatTheyAddAlone) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer's notes of what is touched count as memory";
#endif
  TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.layers = 1;
  options.head_dim = 128;
  options.ranks = {256};
  auto run = long_run(options, 16384);
  const int64_t summary = engine_ledger(run->engine()).at("summary");
  ASSERT_GE(summary, 15 << 20);
  std::vector<std::unique_ptr<Engine>> forks;
  const int64_t before = resident_bytes();
  for (int i = 0; i < 4; ++i) forks.push_back(fork_of(run->engine()));
  EXPECT_LT(resident_bytes() - before, summary);
}

}  // namespace
}  // namespace kvswap
