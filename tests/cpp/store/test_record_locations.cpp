#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "io/test_files.h"
#include "store/record_locations.h"

namespace kvswap {
namespace {

constexpr int64_t kRecord = 4096;

TEST(RecordLocations, StandAboveTheFilesThatTheyContinueAndKnowWhoseSeedIsWhose) {
  const TempDirectory directory;
  auto file = must(DataFile::open({.directory = directory.path(), .mode = IoMode::kBuffered}));
  RecordLocations places(file.get(), must(SequenceLayout::create(kRecord, kRecord, 1)),
                         10 * kRecord, 7, {{0, 5}, {4, 6}});
  EXPECT_EQ(places.seed_of(3), 5u);
  EXPECT_EQ(places.seed_of(4), 6u);
  EXPECT_EQ(places.seed_of(10), 7u);
  EXPECT_EQ(places.first_place(), 10);
  EXPECT_EQ(must(places.take({.count = 1})), 10 * kRecord);
  EXPECT_EQ(must(places.take({.count = 1})), 11 * kRecord);
  places.release(3);  // of a file below: it stays
  places.release(10);
  std::vector<std::pair<int64_t, int64_t>> holes;
  places.each_hole([&](int64_t offset, int64_t length) { holes.emplace_back(offset, length); });
  EXPECT_EQ(holes, (std::vector<std::pair<int64_t, int64_t>>{{10 * kRecord, kRecord}}));
  EXPECT_EQ(places.end_bytes(), 12 * kRecord);

  places.begin_file(20 * kRecord, 8);
  EXPECT_EQ(must(places.take({.count = 1})), 20 * kRecord);
  EXPECT_EQ(places.seed_of(19), 7u);
  EXPECT_EQ(places.seed_of(20), 8u);
  EXPECT_EQ(places.seed(), 8u);
  ASSERT_EQ(places.seeds().size(), 4u);
}

TEST(RecordLocations, GiveUpWhatWasTakenAheadWhereTheQuotaEnds) {
  const TempDirectory directory;
  auto file = must(DataFile::open({.directory = directory.path(),
                                   .mode = IoMode::kBuffered,
                                   .quota_bytes = 3 * kRecord,
                                   .extend_bytes = kRecord}));
  RecordLocations places(file.get(), must(SequenceLayout::create(kRecord, kRecord, 1)), 0, 1, {});
  for (const int64_t place : {0, 1, 2}) EXPECT_EQ(must(places.take({.count = 1})), place * kRecord);
  EXPECT_EQ(places.take({.count = 1}).status().code(), StatusCode::kBudget);
  EXPECT_EQ(places.end_bytes(), 3 * kRecord) << "what was refused is not in use";
  places.release(1);
  EXPECT_EQ(must(places.take({.count = 1})), kRecord);
}

}  // namespace
}  // namespace kvswap
