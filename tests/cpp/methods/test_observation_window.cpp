#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "methods/retention/observation_window.h"

namespace kvswap {
namespace {

constexpr int64_t kHeads = 2;

/// Query i of head h is the one byte 100 h + i; queries [count, heads].
struct Queries {
  std::vector<std::byte> bytes;
  ObservationWindow::Decoded decoded(int64_t first, int64_t count) {
    bytes.clear();
    for (int64_t i = first; i < first + count; ++i) {
      for (int64_t head = 0; head < kHeads; ++head) bytes.push_back(std::byte(100 * head + i));
    }
    return {.queries = bytes.data(),
            .head_stride = 1,
            .query_stride = kHeads,
            .row_bytes = 1,
            .heads = kHeads,
            .count = count,
            .first_position = first};
  }
};

using Positions = std::vector<int64_t>;

/// The window's positions, as its queries tell them: each head the same, and in runs of slots.
Positions told(const ObservationWindow& window) {
  const int64_t stride = static_cast<int64_t>(window.queries.size()) / kHeads;
  Positions positions;
  while (static_cast<int64_t>(positions.size()) < window.count) {
    const auto first = static_cast<int64_t>(positions.size());
    for (int64_t i = 0; i < window.in_a_row(first); ++i) {
      const std::byte* query = window.queries.data() + window.slot(first) + i;
      positions.push_back(static_cast<int64_t>(*query));
      EXPECT_EQ(static_cast<int64_t>(query[stride]), positions.back() + 100);
      EXPECT_EQ(positions.back(), window.first_position + first + i);
    }
  }
  return positions;
}

/// As a long chunk leaves it.
ObservationWindow of_chunk(int64_t first, int64_t count) {
  ObservationWindow window;
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < count; ++i) window.queries.push_back(std::byte(100 * head + first + i));
  }
  window.count = count;
  window.first_position = first;
  window.log_sum_exp.assign(kHeads * count, 1.0f);
  return window;
}

TEST(ObservationWindow, HoldsTheNewestOfAll) {
  Queries queries;
  ObservationWindow window = of_chunk(7, 3);
  EXPECT_EQ(told(window), (Positions{7, 8, 9}));
  window.add(queries.decoded(10, 1), 4);
  EXPECT_EQ(told(window), (Positions{7, 8, 9, 10}));
  EXPECT_TRUE(window.log_sum_exp.empty()) << "of the new one it is not known";
  window.add(queries.decoded(11, 1), 4);
  window.add(queries.decoded(12, 2), 4);
  EXPECT_EQ(told(window), (Positions{10, 11, 12, 13}));
  window.add(queries.decoded(14, 6), 4);
  EXPECT_EQ(told(window), (Positions{16, 17, 18, 19})) << "of a step longer than it";
  for (int64_t position = 20; position < 40; ++position)
    window.add(queries.decoded(position, 1), 4);
  EXPECT_EQ(told(window), (Positions{36, 37, 38, 39}));
}

TEST(ObservationWindow, BeginsWithWhatIsDecoded) {
  Queries queries;
  ObservationWindow window;
  window.add(queries.decoded(5, 2), 3);
  EXPECT_EQ(told(window), (Positions{5, 6}));
  window.add(queries.decoded(7, 2), 3);
  EXPECT_EQ(told(window), (Positions{6, 7, 8}));
  window.add(queries.decoded(20, 1), 3);
  EXPECT_EQ(told(window), (Positions{20})) << "what does not stand just before is forgotten";
}

TEST(ObservationWindow, TakesAStepThatIsMadeAgainOnce) {
  Queries queries;
  ObservationWindow window = of_chunk(7, 3);
  for (int64_t position = 10; position < 15; ++position)
    window.add(queries.decoded(position, 1), 3);
  window.add(queries.decoded(14, 1), 3);
  EXPECT_EQ(told(window), (Positions{12, 13, 14}));
  window.truncate(14);
  EXPECT_EQ(told(window), (Positions{12, 13}));
  window.add(queries.decoded(14, 2), 3);
  EXPECT_EQ(told(window), (Positions{13, 14, 15}));
  window.truncate(13);
  EXPECT_EQ(window.count, 0);
  window.truncate(2);
  EXPECT_EQ(window.count, 0);
}

}  // namespace
}  // namespace kvswap
