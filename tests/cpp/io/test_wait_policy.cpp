// How long calls wait: what is logged, given up, or ended, and how often.

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "io/wait_policy.h"
#include "test_files.h"

namespace kvswap {
namespace {

/// Waits for what came forward `age_ns` ago and is ready once it was asked about `looks` times.
Status wait(const WaitPolicy& patience, int64_t age_ns, int looks) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  int asked = 0;
  return patience.wait(
      lock, changed, [&] { return asked >= looks; }, [&] { return WaitPolicy::now_ns() - age_ns; },
      [&] {
        ++asked;
        return std::string("read of 4096 bytes at offset 8192 of '/x'");
      });
}

constexpr int64_t kSecond = 1'000'000'000;

TEST(WaitPolicy, WhatTakesASecondIsLoggedOnceWithItsPlace) {
  std::vector<std::string> said;
  set_log([&](const std::string& line) { said.push_back(line); });
  must(wait(WaitPolicy(60), 2 * kSecond, 4));
  ASSERT_EQ(said.size(), 1u);
  EXPECT_TRUE(contains(said[0], "offset 8192 of '/x'")) << said[0];
  said.clear();
  must(wait(WaitPolicy(60), 0, 2));
  EXPECT_TRUE(said.empty());
  set_log(nullptr);
}

TEST(WaitPolicy, GivesUpAtItsLimitAndNeverWithoutOne) {
  set_log([](const std::string&) {});
  const Status late = wait(WaitPolicy(3), 10 * kSecond, 1000);
  EXPECT_EQ(late.code(), StatusCode::kLate);
  EXPECT_TRUE(contains(late.message(), "offset 8192 of '/x'")) << late.message();
  EXPECT_TRUE(contains(late.message(), "io_timeout_seconds")) << late.message();
  must(wait(WaitPolicy(0), 1000 * kSecond, 4));
  set_log(nullptr);
}

/// What came forward long ago, and is ready once a call has waited for it a moment.
TEST(WaitPolicy, GivesACallOfItsOwnASecond) {
  set_log([](const std::string&) {});
  must(wait(WaitPolicy(3), 1000 * kSecond, 5));
  set_log(nullptr);
}

/// Waits for what last came forward when the call began.
template <typename Ready>
Status wait_from_now(const WaitPolicy& patience, const Ready& ready) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  const int64_t began_ns = WaitPolicy::now_ns();
  return patience.wait(
      lock, changed, ready, [&] { return began_ns; }, [] { return std::string("read"); });
}

/// A process that was stopped, or whose machine was paused, has not waited meanwhile.
TEST(WaitPolicy, DoesNotCountTimeInWhichTheProcessStoodStill) {
  set_log([](const std::string&) {});
  for (const bool stands_still : {false, true}) {
    int asked = 0;
    const Status waited = wait_from_now(WaitPolicy(2), [&] {
      if (stands_still && ++asked == 4) std::this_thread::sleep_for(std::chrono::seconds(3));
      return asked > 12;
    });
    EXPECT_EQ(waited.code(), stands_still ? StatusCode::kOk : StatusCode::kLate);
  }
  set_log(nullptr);
}

/// However often it stands still: what hangs is given up.
TEST(WaitPolicy, EndsOnAMachineThatStandsStillAgainAndAgain) {
  set_log([](const std::string&) {});
  int looks = 0;
  const Status waited = wait_from_now(WaitPolicy(0.35), [&] {
    if (++looks % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    return looks > 20;
  });
  EXPECT_EQ(waited.code(), StatusCode::kLate);
  set_log(nullptr);
}

TEST(WaitPolicy, EndsWhenItIsAskedTo) {
  WaitPolicy asked;
  int questions = 0;
  asked.set_question([&] { return ++questions == 3; });
  const Status signalled = wait(asked, 0, 1000);
  EXPECT_EQ(signalled.error_number(), EINTR);
  EXPECT_EQ(questions, 3);
  WaitPolicy stopped;
  stopped.stop();
  EXPECT_EQ(wait(stopped, 0, 1000).error_number(), ECANCELED);
  stopped.wait_for_all();
  must(wait(stopped, 0, 3));
}

}  // namespace
}  // namespace kvswap
