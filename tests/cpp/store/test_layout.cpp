#include <gtest/gtest.h>

#include <random>
#include <set>

#include "store/layout.h"

namespace kvswap {
namespace {

std::unique_ptr<Layout> layout_of(int64_t payload, int64_t alignment, int64_t layers = 2) {
  auto layout = SequenceLayout::create(payload, alignment, layers);
  EXPECT_TRUE(layout.is_ok());
  return std::move(layout.value());
}

TEST(SequenceLayout, PadsToTheAlignmentAndRefusesMostlyPadding) {
  EXPECT_EQ(layout_of(4096, 4096)->record_bytes(), 4096);
  EXPECT_EQ(layout_of(4097, 4096)->record_bytes(), 8192);
  EXPECT_EQ(layout_of(2048, 4096)->record_bytes(), 4096);
  EXPECT_EQ(layout_of(600, 512)->record_bytes(), 1024);
  const auto refused = SequenceLayout::create(2047, 4096, 1);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalid);
  EXPECT_NE(refused.status().message().find("2047"), std::string::npos);
  EXPECT_NE(refused.status().message().find("group_tokens"), std::string::npos);
}

TEST(SequenceLayout, NeighboursInALayerAreNeighboursOnDisk) {
  const auto layout = layout_of(512, 512);
  std::vector<int64_t> first;
  for (int i = 0; i < 64; ++i) {
    first.push_back(layout->place({.layer = 0, .count = 1}));
    layout->place({.layer = 1, .count = 1});
  }
  for (int i = 1; i < 64; ++i) EXPECT_EQ(first[i], first[i - 1] + 512);
}

TEST(SequenceLayout, NeverGivesTwoRecordsOnePlace) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    std::mt19937 random(seed);
    const auto layout = layout_of(512, 512, 3);
    std::set<int64_t> places;
    for (int step = 0; step < 600; ++step) {
      if (random() % 5 < 3) {
        const int64_t count = random() % 4 == 0 ? 1 + random() % 100 : 1 + random() % 8;
        const int64_t offset =
            layout->place({.layer = static_cast<int64_t>(random() % 3), .count = count});
        ASSERT_EQ(offset % 512, 0);
        for (int64_t i = 0; i < count; ++i) ASSERT_TRUE(places.insert(offset + i * 512).second);
        ASSERT_LE(offset + count * 512, layout->end_bytes());
      } else {
        for (int n = random() % 40; n > 0 && !places.empty(); --n) {
          const auto it = std::next(places.begin(), random() % places.size());
          layout->release(*it);
          places.erase(it);
        }
      }
      if (step == 500) layout->tighten();
    }
    for (const int64_t place : places) layout->release(place);
    layout->tighten();
    EXPECT_EQ(layout->end_bytes(), 0) << "what nobody holds is free";
  }
}

TEST(SequenceLayout, TightenedHoldsRecordsAndNothingElse) {
  const auto layout = layout_of(512, 512, 16);
  for (int64_t layer = 0; layer < 16; ++layer) layout->place({.layer = layer, .count = 1});
  EXPECT_GT(layout->end_bytes(), 16 * 512);
  layout->tighten();
  for (int i = 0; i < 16 * 62; ++i) layout->place({.layer = i % 16, .count = 1});
  EXPECT_LE(layout->end_bytes(), (16 * 64) * 512);
  layout->clear();
  EXPECT_EQ(layout->end_bytes(), 0);
}

}  // namespace
}  // namespace kvswap
