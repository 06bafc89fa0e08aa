#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "io/memory_facts.h"
#include "memory/page_pool.h"

namespace kvswap {
namespace {

constexpr int64_t kPages = 7;
constexpr int64_t kPageBytes = 1536;

TEST(PagePool, PagesDoNotOverlapAndAreAligned) {
  const auto pool = make_host_page_pool(kPages, 8192);
  ASSERT_TRUE(pool.is_ok());
  EXPECT_EQ(pool.value().pages(), kPages);
  EXPECT_EQ(pool.value().resident_bytes(), kPages * 8192);
  for (int32_t page = 0; page < kPages; ++page) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pool.value().page(page)) % 4096, 0u);
    EXPECT_EQ(pool.value().page(page), pool.value().page(0) + page * 8192);
  }
}

TEST(PagePool, FreesItsMemoryWithTheLastOfItsOwners) {
  int freed = 0;
  auto* bytes = new std::byte[kPages * kPageBytes];
  {
    const auto free = [&](std::byte* memory) {
      ++freed;
      delete[] memory;
    };
    const PagePool pool(std::shared_ptr<std::byte>(bytes, free), kPages, kPageBytes);
    EXPECT_EQ(pool.page(3), bytes + 3 * kPageBytes);
    EXPECT_EQ(freed, 0);
  }
  EXPECT_EQ(freed, 1);
}

TEST(PagePool, WhatTheSystemCannotLendIsAnError) {
  const auto pool = make_host_page_pool(int64_t{1} << 32, int64_t{1} << 28);
  ASSERT_FALSE(pool.is_ok());
  EXPECT_EQ(pool.status().code(), StatusCode::kBudget);
}

TEST(PagePoolDeathTest, APageThatIsNotThereIsOurMistake) {
  const auto pool = make_host_page_pool(kPages, kPageBytes);
  ASSERT_TRUE(pool.is_ok());
  EXPECT_DEATH(pool.value().page(kPages), "does not hold");
  EXPECT_DEATH(pool.value().page(-1), "does not hold");
}

TEST(PagePool, IsLeftOutOfCoreDumps) {
  if (KVSWAP_CPU_IS_EMULATED) GTEST_SKIP() << "qemu-user shows the emulator's own maps";
  const auto pool = make_host_page_pool(kPages, 4096);
  ASSERT_TRUE(pool.is_ok());
  for (int32_t page = 0; page < kPages; ++page) {
    EXPECT_TRUE(is_left_out_of_dumps(pool.value().page(page)));
  }
  const std::vector<std::byte> other(1 << 20);
  EXPECT_FALSE(is_left_out_of_dumps(other.data()));
}

TEST(PagePool, IsWipedAtItsEndWhenAsked) {
  for (const AtEnd at_end : {AtEnd::kLeft, AtEnd::kWiped}) {
    auto pool = std::make_unique<PagePool>(
        std::move(make_host_page_pool(kPages, SecondLook::kBytes, at_end).value()));
    std::memset(pool->page(0), 0x5a, kPages * SecondLook::kBytes);
    SecondLook look(pool->page(kPages - 1));
    if (!look.works()) GTEST_SKIP() << "vmsplice is refused here";
    pool.reset();
    const auto left = at_end == AtEnd::kWiped ? std::byte{0} : std::byte{0x5a};
    EXPECT_EQ(look.bytes(), std::vector<std::byte>(SecondLook::kBytes, left));
  }
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
  if (KVSWAP_CPU_IS_EMULATED) GTEST_SKIP() << "qemu-user takes MADV_DONTFORK and does nothing";
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
