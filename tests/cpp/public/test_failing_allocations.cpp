// The n-th allocation fails, for n = 1, 2, 3 ... until none does: an exception, and nothing else.
//
// All threads' allocations count, those of readers and writers too: one that nobody catches would
// end this process. Left out are those of the JSON library's destructors: they allocate, and may
// not throw.

#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>

#include "kvswap/saved_cache.h"
#include "saved_run.h"

#if KVSWAP_HAS_JSON

// Inlined, what is allocated by `new` and freed by free() looks like a mistake.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {

std::atomic<int64_t> allocations_left{-1};  // below 0: none fails
std::atomic<bool> has_struck{false};

/// Whether a value of the JSON library is being freed: by the names of the calls (-rdynamic).
bool is_json_freed() {
  void* calls[16];
  const int count = ::backtrace(calls, 16);
  for (int i = 0; i < count; ++i) {
    Dl_info call;
    if (::dladdr(calls[i], &call) != 0 && call.dli_sname != nullptr &&
        std::strstr(call.dli_sname, "json_value7destroy") != nullptr)
      return true;
  }
  return false;
}

void* allocate(size_t bytes, size_t alignment) {
  if (allocations_left.load() > 0 && allocations_left.fetch_sub(1) == 1) {
    if (is_json_freed()) {
      allocations_left = 1;  // the next one
    } else {
      has_struck = true;
      return nullptr;
    }
  }
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

}  // namespace

void* operator new(size_t bytes) {
  if (void* memory = allocate(bytes, 0)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  if (void* memory = allocate(bytes, static_cast<size_t>(alignment))) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 0); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace kvswap {
namespace {

/// Runs `act` after `prepare`, with each of its allocations failing once; then `check`, with none.
/// How many there were.
template <typename State>
int64_t each_fails(const std::function<State()>& prepare, const std::function<void(State&)>& act,
                   const std::function<void(State&)>& check) {
  for (int64_t nth = 1;; ++nth) {
    State state = prepare();
    has_struck = false;
    allocations_left = nth;
    std::string error;
    try {
      act(state);
    } catch (const std::exception& thrown) {
      allocations_left = -1;
      error = thrown.what();
      EXPECT_FALSE(error.empty()) << "allocation " << nth;
    }
    allocations_left = -1;
    check(state);
    if (::testing::Test::HasFailure()) return nth;
    if (!has_struck) return nth - 1;
  }
}

struct Life {
  std::unique_ptr<Cache> cache;
  std::unique_ptr<Cache> other;
};

class FailingAllocations : public ::testing::Test {
 protected:
  Life filled() const {
    Life life{std::make_unique<Cache>(options_in(folder_.path())), nullptr};
    step(*life.cache, 60, 1);
    step(*life.cache, 1, 2);
    return life;
  }
  /// It goes on with the right numbers, once what failed has been taken back; or it says that
  /// memory ran out in the middle, and nothing else.
  void goes_on(Cache& cache, int64_t positions) const {
    if (is_broken(cache)) return;
    if (cache.layer(0).positions != positions || cache.layer(1).positions != positions)
      cache.crop(positions);
    static const std::vector<float> right = [this] {
      Life life = filled();
      return step(*life.cache, 1, 3);
    }();
    EXPECT_EQ(step(cache, 1, 3), right);
  }
  static bool is_broken(Cache& cache) {
    const std::string told = message_of([&] { cache.layer(0); });
    if (told.empty()) return false;
    EXPECT_NE(told.find("memory ran out in the middle"), std::string::npos) << told;
    cache.report();
    cache.close();
    return true;
  }
  const Folder folder_;
};

TEST_F(FailingAllocations, WhenACacheIsOpened) {
  const int64_t count = each_fails<Life>(
      [] { return Life{}; },
      [&](Life& life) { life.cache = std::make_unique<Cache>(options_in(folder_.path())); },
      [](Life&) {});
  EXPECT_GT(count, 10);
  EXPECT_TRUE(folder_.names().empty());
}

TEST_F(FailingAllocations, InAPrefill) {
  const int64_t count = each_fails<Life>(
      [&] { return Life{std::make_unique<Cache>(options_in(folder_.path())), nullptr}; },
      [](Life& life) { step(*life.cache, 60, 1); },
      [&](Life& life) {
        if (is_broken(*life.cache)) return;
        life.cache->reset();
        step(*life.cache, 60, 1);
        step(*life.cache, 1, 2);
        goes_on(*life.cache, 61);
      });
  EXPECT_GT(count, 10);
}

TEST_F(FailingAllocations, InAStepOfDecoding) {
  const int64_t count =
      each_fails<Life>([&] { return filled(); }, [](Life& life) { step(*life.cache, 1, 3); },
                       [&](Life& life) {
                         if (is_broken(*life.cache)) return;
                         life.cache->crop(61);
                         goes_on(*life.cache, 61);
                       });
  EXPECT_GT(count, 2);
}

TEST_F(FailingAllocations, WhenItIsSaved) {
  const std::string path = folder_ / "book.kvswap";
  const int64_t count = each_fails<Life>(
      [&] { return filled(); }, [&](Life& life) { life.cache->save({.path = path}); },
      [&](Life& life) {
        for (const std::string& name : folder_.names()) {
          EXPECT_EQ(name, "book.kvswap") << "nothing is left of a save that failed";
          SavedCache::open(path)->verify();
          life.cache->close();
          SavedCache::remove(path);
          return;
        }
        goes_on(*life.cache, 61);
      });
  EXPECT_GT(count, 10);
}

TEST_F(FailingAllocations, WhenItIsForked) {
  const int64_t count = each_fails<Life>([&] { return filled(); },
                                         [](Life& life) { life.other = life.cache->fork(); },
                                         [&](Life& life) {
                                           if (life.other != nullptr) goes_on(*life.other, 61);
                                           goes_on(*life.cache, 61);
                                         });
  EXPECT_GT(count, 10);
}

TEST_F(FailingAllocations, WhenASavedOneIsOpened) {
  const std::string path = folder_ / "book.kvswap";
  filled().cache->save({.path = path});
  const int64_t count = each_fails<Life>([] { return Life{}; },
                                         [&](Life& life) {
                                           const auto saved = SavedCache::open(path);
                                           life.cache = std::make_unique<Cache>(
                                               *saved, saved->options(folder_.path(), {}));
                                         },
                                         [&](Life& life) {
                                           if (life.cache != nullptr) goes_on(*life.cache, 61);
                                         });
  EXPECT_GT(count, 10);
}

}  // namespace
}  // namespace kvswap

#endif
