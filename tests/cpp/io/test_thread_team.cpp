// Threads that help with short loops.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "io/thread_team.h"

namespace kvswap {
namespace {

/// Counts how often each of [0, count) is met, and sees that pieces are as long as they should be.
std::vector<int> visits(ThreadTeam& team, int64_t count, int64_t grain) {
  std::vector<std::atomic<int>> met(static_cast<size_t>(count));
  team.run(count, grain, [&](int64_t begin, int64_t end) {
    EXPECT_LT(begin, end);
    for (int64_t i = begin; i < end; ++i) ++met[static_cast<size_t>(i)];
  });
  return {met.begin(), met.end()};
}

TEST(ThreadTeam, MeetsEachOnce) {
  for (const int helpers : {0, 1, 3, 7}) {
    const auto team = ThreadTeam::start(helpers);
    EXPECT_EQ(team->helpers(), helpers);
    for (const int64_t count : {0, 1, 2, 31, 32, 33, 1000}) {
      for (const int64_t grain : {0, 1, 32, 5000}) {
        EXPECT_EQ(visits(*team, count, grain), std::vector<int>(static_cast<size_t>(count), 1))
            << helpers << " helpers, " << count << " by " << grain;
      }
    }
  }
}

TEST(ThreadTeam, HelpersTakePieces) {
  const auto team = ThreadTeam::start(1);
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> has_helped = false;
  // The caller holds its first piece until a helper has one.
  team->run(2, 1, [&](int64_t, int64_t) {
    if (std::this_thread::get_id() != caller) has_helped = true;
    for (int turn = 0; turn < 20000 && !has_helped; ++turn) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  EXPECT_TRUE(has_helped);
}

TEST(ThreadTeam, NoHelperIsLeftInALoopThatHasEnded) {
  const auto team = ThreadTeam::start(3);
  for (int turn = 0; turn < 5000; ++turn) {
    auto numbers = std::make_unique<std::vector<int>>(8, 1);  // freed at once: a late helper faults
    team->run(8, 1,
              [&numbers](int64_t begin, int64_t) { ++(*numbers)[static_cast<size_t>(begin)]; });
    EXPECT_EQ(*std::ranges::min_element(*numbers), 2);
  }
}

TEST(ThreadTeam, ALoopBesideAnotherIsItsCallersAlone) {
  const auto team = ThreadTeam::start(2);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total = 0;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 500; ++turn) {
        team->run(64, 4, [&](int64_t begin, int64_t end) { total += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 500 * 64);
}

TEST(ThreadTeam, ALoopWithinAnotherIsItsCallersAlone) {
  const auto team = ThreadTeam::start(2);
  std::atomic<int64_t> total = 0;
  team->run(16, 1, [&](int64_t, int64_t) {
    team->run(8, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
  });
  EXPECT_EQ(total, 16 * 8);
}

TEST(ThreadTeam, WhatAPieceThrowsIsThrownOnce) {
  const auto team = ThreadTeam::start(3);
  for (int turn = 0; turn < 500; ++turn) {
    EXPECT_THROW(team->run(64, 1,
                           [](int64_t begin, int64_t) {
                             if (begin % 5 == 3) throw std::bad_alloc();
                           }),
                 std::bad_alloc);
    EXPECT_EQ(visits(*team, 40, 1), std::vector<int>(40, 1));
  }
}

TEST(ThreadTeam, AForkedChildRunsLoopsAlone) {
  auto team = ThreadTeam::start(2);
  const pid_t child = ::fork();
  if (child == 0) {
    int64_t sum = 0;
    team->run(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
    team.reset();  // waits for nobody
    ::_exit(sum == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace kvswap
