#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kvswap/cache.h"
#include "saved_run.h"

namespace kvswap {
namespace {

constexpr int64_t kWidth = 32;  // of options_in()

CacheOptions choosing(const std::string& directory, int64_t rank, int64_t groups) {
  CacheOptions options = options_in(directory);
  options.settings.rank = rank;
  options.settings.groups_max = groups;
  options.settings.pages_max = 2 * groups;
  options.settings.summary_dtype = rank < 8 ? "int4" : "int8";
  options.ranks = {rank};
  return options;
}

/// The first `rank` columns of drawn ones.
Projection projection(int64_t rank) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  Projection made = {.width = kWidth, .rank = 8, .keys = {}, .queries = {}};
  for (int64_t i = 0; i < kWidth * made.rank; ++i) {
    made.keys.push_back(normal(random));
    made.queries.push_back(normal(random));
  }
  return made.cut(rank);
}

void project(Cache& cache, int64_t rank) {
  for (int64_t layer = 0; layer < 2; ++layer) cache.set_projection(layer, projection(rank));
}

TEST(DividedAnew, GoesOnAsOneThatHadTheDivisionFromTheStart) {
  Folder folder;
  Cache cache(choosing(folder.path(), 8, 30));
  Cache other(choosing(folder.path(), 4, 12));
  project(cache, 8);
  project(other, 4);
  for (Cache* each : {&cache, &other}) (void)step(*each, 700, 1);
  cache.divide(choosing(folder.path(), 4, 12));
  EXPECT_EQ(cache.options().settings.groups_max, 12);
  for (uint64_t seed = 2; seed < 20; ++seed) {
    const int64_t tokens = seed == 9 ? 100 : 1 + static_cast<int64_t>(seed) % 3;
    EXPECT_EQ(step(cache, tokens, seed), step(other, tokens, seed)) << seed;
    EXPECT_EQ(cache.last_selection(1), other.last_selection(1));
  }
  cache.crop(300);
  other.crop(300);
  EXPECT_EQ(step(cache, 2, 30), step(other, 2, 30));
}

TEST(DividedAnew, GivesNoProjectionMoreColumnsThanItHas) {
  Folder folder;
  Cache cache(choosing(folder.path(), 4, 12));
  project(cache, 4);
  (void)step(cache, 300, 1);
  EXPECT_EQ(message_of([&] { cache.divide(choosing(folder.path(), 8, 12)); }),
            "divide: layer 0 must have a rank of at most 4, which its projection has, got 8");
  (void)step(cache, 1, 2);
  EXPECT_EQ(cache.options().ranks, (std::vector<int64_t>{4, 4}));
}

TEST(DividedAnew, KeepsTheOldDivisionWhereTheNewOneDoesNotFit) {
  Folder folder;
  Cache cache(choosing(folder.path(), 8, 30));
  Cache other(choosing(folder.path(), 8, 30));
  for (Cache* each : {&cache, &other}) {
    project(*each, 8);
    (void)step(*each, 700, 1);
  }
  CacheOptions small = choosing(folder.path(), 4, 12);
  small.budget.kv_memory_bytes = 1000;
  EXPECT_NE(message_of([&] { cache.divide(small); }).find("kv_memory_bytes"), std::string::npos);
  EXPECT_EQ(cache.options().settings.groups_max, 30);
  for (uint64_t seed = 2; seed < 8; ++seed) EXPECT_EQ(step(cache, 1, seed), step(other, 1, seed));
}

}  // namespace
}  // namespace kvswap
