#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "io/pooled_memory.h"

namespace kvswap {
namespace {

TEST(PooledMemory, HoldsContainersAndUsesTheirPlacesAgain) {
  const auto memory = make_pooled_memory();
  std::pmr::deque<int> numbers(memory.get());
  for (int i = 0; i < 100000; ++i) numbers.push_back(i);
  for (int i = 0; i < 100000; ++i) ASSERT_EQ(numbers[i], i);

  void* const first = memory->allocate(64, 8);
  memory->deallocate(first, 64, 8);
  EXPECT_EQ(memory->allocate(64, 8), first);
}

TEST(PooledMemory, LendsMoreThanAPieceAndKeepsAlignment) {
  const auto memory = make_pooled_memory();
  for (const size_t bytes : {1, 24, 512, 513, 1 << 20}) {
    for (const size_t alignment : {8, 16, 64}) {
      void* const lent = memory->allocate(bytes, alignment);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(lent) % alignment, 0u) << bytes;
      std::memset(lent, 1, bytes);
      memory->deallocate(lent, bytes, alignment);
    }
  }
}

TEST(PooledMemory, ServesThreads) {
  const auto memory = make_pooled_memory();
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      std::vector<unsigned char*> lent;
      for (int i = 0; i < 2000; ++i) {
        lent.push_back(static_cast<unsigned char*>(memory->allocate(48, 8)));
        std::memset(lent.back(), id, 48);
      }
      for (const unsigned char* each : lent) {
        for (int i = 0; i < 48; ++i) ASSERT_EQ(each[i], id);
      }
      for (unsigned char* each : lent) memory->deallocate(each, 48, 8);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// As when a thread has generated a text and another closes the cache: its work is done, but it has
// not ended. Pools kept by thread would be handed back to freed memory at the end of it.
TEST(PooledMemory, IsFreedWhileAThreadThatUsedItEnds) {
  for (int round = 0; round < 1000; ++round) {
    auto memory = make_pooled_memory();
    for (int i = 0; i < 1000; ++i) (void)memory->allocate(512, 8);  // to free them takes a while
    std::atomic<bool> done = false;
    std::thread user([&] {
      for (int i = 0; i < 20; ++i) (void)memory->allocate(48, 8);
      done = true;
    });
    while (!done) continue;
    memory.reset();
    user.join();
  }
}

// A key for thread-local storage each would end at 1,024 of them (PTHREAD_KEYS_MAX).
TEST(PooledMemory, IsHadByThousands) {
  std::vector<std::unique_ptr<std::pmr::memory_resource>> memories;
  for (int i = 0; i < 3000; ++i) {
    memories.push_back(make_pooled_memory());
    void* const lent = memories.back()->allocate(48, 8);
    memories.back()->deallocate(lent, 48, 8);
  }
}

}  // namespace
}  // namespace kvswap
