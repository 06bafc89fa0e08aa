// One caller at a time: threads that meet in a session, and one that closes it under another.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "kvswap/cache.h"
#include "kvswap/exclusive_call_guard.h"

namespace kvswap {
namespace {

constexpr int64_t kTokens = 24;

CacheOptions small(const std::string& directory) {
  CacheOptions options;
  options.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};
  options.settings.rank = 8;
  options.settings.groups_max = 8;
  options.settings.pages_max = 8;
  options.settings.tail_tokens = 8;
  options.directory = directory;
  return options;
}

/// Appends and attends for ever: what a text that is being generated does.
void generate(Cache& session) {
  const CacheOptions options = small("");
  const std::vector<float> numbers(4 * kTokens * 16, 0.5f);
  std::vector<float> output(numbers.size());
  for (int turn = 0;; ++turn) {
    if (turn % 8 == 0) session.reset();
    for (int64_t layer = 0; layer < 2; ++layer) {
      session.append(layer,
                     NewTokens::packed(numbers.data(), numbers.data(), options.shape, 1, kTokens));
      session.attend(layer, Queries::packed(numbers.data(), 4, kTokens, 16), 0.25f, output.data());
    }
  }
}

class OneCallerTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(::mkdtemp(path_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(path_); }

  std::string path_ = std::filesystem::temp_directory_path() / "kvswap-caller-XXXXXX";
};

TEST_F(OneCallerTest, ClosingUnderARunningTextEndsItWithOneClearError) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 50; ++turn) {
    Cache session(small(path_));
    std::atomic<int> kind = -1;
    std::thread other([&] {
      try {
        generate(session);
      } catch (const SessionError& error) {
        kind = static_cast<int>(error.kind());
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    session.close();
    other.join();
    EXPECT_EQ(kind, static_cast<int>(SessionError::Kind::kClosed));
    EXPECT_THROW((void)session.held().batch, SessionError);
    session.close();
  }
}

TEST_F(OneCallerTest, FourThreadsGetAnErrorEachTimeTheyMeet) {
  Cache session(small(path_));
  std::atomic<int> refused = 0;
  std::atomic<int> served = 0;
  std::vector<std::thread> threads;
  const std::vector<float> numbers(2 * kTokens * 16, 0.5f);
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&, index] {
      for (int turn = 0; turn < 200; ++turn) {
        try {
          if (index == 0 && turn % 3 == 0) session.reset();
          if (index == 1) session.crop(3);
          session.append(turn % 2, NewTokens::packed(numbers.data(), numbers.data(),
                                                     small("").shape, 1, kTokens));
          (void)session.report().counters;
          ++served;
        } catch (const SessionError& error) {
          EXPECT_EQ(error.kind(), SessionError::Kind::kBusy) << error.what();
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused + served, 800);
  session.reset();
  EXPECT_EQ(session.held().batch, 0);
}

TEST(ExclusiveCallGuard, ACloseFromWithinACallTakesEffectWhenItReturns) {
  ExclusiveCallGuard caller;
  bool is_stopped = false;
  {
    const ExclusiveCallGuard::Call call(caller);
    EXPECT_FALSE(caller.is_close_due());
    EXPECT_FALSE(caller.close([&] { is_stopped = true; }));
    EXPECT_TRUE(is_stopped);
    EXPECT_TRUE(caller.is_close_due());
    EXPECT_THROW(ExclusiveCallGuard::Call again(caller), SessionError);
  }
  EXPECT_TRUE(caller.close([] {}));
  caller.closed();
  EXPECT_FALSE(caller.close([] {}));
  EXPECT_THROW(ExclusiveCallGuard::Call again(caller), SessionError);
}

TEST(ExclusiveCallGuard, AForkedChildWaitsForNoCall) {
  ExclusiveCallGuard caller;
  std::atomic<bool> is_inside = false;
  std::atomic<bool> shall_end = false;
  std::thread other([&] {
    const ExclusiveCallGuard::Call call(caller);
    is_inside = true;
    is_inside.notify_all();
    shall_end.wait(false);
  });
  is_inside.wait(false);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(caller.close([] {}) ? 1 : 0);
  }
  int ended = -1;
  EXPECT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0) << "closed, or still waiting";
  shall_end = true;
  shall_end.notify_all();
  other.join();
}

}  // namespace
}  // namespace kvswap
