#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "memory/page_pool.h"

namespace kvswap {
namespace {

constexpr int64_t kPages = 7;
constexpr int64_t kPageBytes = 1536;

std::unique_ptr<PagePool> pool_of(Result<std::unique_ptr<PagePool>> pool) {
  EXPECT_TRUE(pool.is_ok());
  return std::move(pool.value());
}

TEST(PagePool, PagesDoNotOverlapAndAreAligned) {
  for (auto* make : {make_direct_page_pool, make_staged_page_pool}) {
    const auto pool = pool_of(make(kPages, 8192));
    EXPECT_EQ(pool->pages(), kPages);
    for (int32_t page = 0; page < kPages; ++page) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(pool->page(page)) % 4096, 0u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(pool->landing(page)) % 4096, 0u);
      EXPECT_EQ(pool->page(page), pool->page(0) + page * 8192);
      EXPECT_EQ(pool->landing(page), pool->landing(0) + page * 8192);
    }
  }
}

TEST(PagePool, DirectReadsLandWhereTheyAreUsed) {
  const auto pool = pool_of(make_direct_page_pool(kPages, kPageBytes));
  EXPECT_EQ(pool->resident_bytes(), kPages * kPageBytes);
  for (int32_t page = 0; page < kPages; ++page) EXPECT_EQ(pool->landing(page), pool->page(page));
}

TEST(PagePool, StagedReadsAreSeenOncePublished) {
  const auto pool = pool_of(make_staged_page_pool(kPages, kPageBytes));
  EXPECT_EQ(pool->resident_bytes(), 2 * kPages * kPageBytes);
  for (int32_t page = 0; page < kPages; ++page) {
    std::memset(pool->page(page), 1, kPageBytes);
    std::memset(pool->landing(page), 10 + page, kPageBytes);
  }
  const std::vector<int32_t> landed = {5, 0, 3};
  pool->publish(landed);
  pool->publish({});
  for (int32_t page = 0; page < kPages; ++page) {
    const bool is_published = std::count(landed.begin(), landed.end(), page) > 0;
    const std::byte expected{static_cast<uint8_t>(is_published ? 10 + page : 1)};
    EXPECT_EQ(pool->page(page)[0], expected);
    EXPECT_EQ(pool->page(page)[kPageBytes - 1], expected);
  }
}

TEST(PagePool, WhatTheSystemCannotLendIsAnError) {
  const auto pool = make_direct_page_pool(int64_t{1} << 32, int64_t{1} << 28);
  ASSERT_FALSE(pool.is_ok());
  EXPECT_EQ(pool.status().code(), StatusCode::kBudget);
}

TEST(PagePoolDeathTest, APageThatIsNotThereIsOurMistake) {
  const auto pool = pool_of(make_staged_page_pool(kPages, kPageBytes));
  EXPECT_DEATH(pool->page(kPages), "does not hold");
  EXPECT_DEATH(pool->landing(-1), "does not hold");
}

TEST(AlignedBytes, MovesWithoutACopy) {
  auto memory = AlignedBytes::allocate(10000);
  ASSERT_TRUE(memory.is_ok());
  std::byte* data = memory.value().data();
  AlignedBytes moved(std::move(memory.value()));
  AlignedBytes assigned;
  assigned = std::move(moved);
  EXPECT_EQ(assigned.data(), data);
  EXPECT_EQ(assigned.size(), 10000);
  EXPECT_EQ(AlignedBytes::allocate(0).value().data(), nullptr);
}

TEST(AlignedBytes, OfTheParentAreNotTheChildsToUnmap) {
  constexpr int64_t kBytes = 1 << 20;
  auto memory = std::make_unique<AlignedBytes>(std::move(AlignedBytes::allocate(kBytes).value()));
  const pid_t child = ::fork();
  if (child == 0) {
    // The child has a hole there, and puts something of its own into it.
    void* own = ::mmap(memory->data(), kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != memory->data()) ::_exit(2);
    memory.reset();
    std::memset(own, 1, kBytes);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kvswap
