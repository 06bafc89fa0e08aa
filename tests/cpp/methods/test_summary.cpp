#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "methods/summary.h"

namespace kvswap {
namespace {

constexpr int64_t kRank = 3;
constexpr int64_t kChunkTokens = 32;

/// Appends rows whose one number (rank 0) is given, block by block.
void append(Summary& summary, const std::vector<float>& numbers) {
  const Status appended = summary.append(
      static_cast<int64_t>(numbers.size()),
      [&](Summary::Chunk& chunk, int64_t first_row, int64_t first_token, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = first_row + i;
          const int64_t at = row / 16 * kRank * 16 + row % 16;
          std::memcpy(chunk.rows.data() + at * sizeof(float), &numbers[first_token + i],
                      sizeof(float));
        }
      });
  EXPECT_TRUE(appended.is_ok()) << appended.message();
}

std::vector<float> numbers_of(const Summary& summary) {
  std::vector<float> numbers;
  for (int64_t index = 0; index < summary.chunks(); ++index) {
    for (int64_t row = 0; row < summary.chunk_rows(index); ++row) {
      const int64_t at = row / 16 * kRank * 16 + row % 16;
      numbers.emplace_back();
      std::memcpy(&numbers.back(), summary.chunk(index).rows.data() + at * sizeof(float),
                  sizeof(float));
    }
  }
  return numbers;
}

TEST(Summary, CopiesShareUntilTheyDifferAndEachSeesItsOwnRows) {
  const Summary::Shape shape = {kRank, kChunkTokens, DType::kFloat32};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto live = make_host_summary_memory();
    std::vector<Summary> summaries(1, Summary(shape, live));
    std::vector<std::vector<float>> models(1);
    for (int step = 0; step < 200; ++step) {
      const size_t at = random() % summaries.size();
      if (const uint32_t action = random() % 8; action < 5) {
        std::vector<float> numbers(random() % 50);
        for (float& number : numbers) number = static_cast<float>(random() % 1000);
        const int64_t chunks = summaries[at].chunks_to_append(numbers.size());
        const int64_t before = live->live_bytes();
        append(summaries[at], numbers);
        ASSERT_EQ(live->live_bytes() - before, chunks * shape.chunk_bytes());
        models[at].insert(models[at].end(), numbers.begin(), numbers.end());
      } else if (action < 6) {
        models[at].resize(random() % (models[at].size() + 1));
        summaries[at].truncate(static_cast<int64_t>(models[at].size()));
      } else if (action < 7 && summaries.size() < 5) {
        const int64_t before = live->live_bytes();
        summaries.push_back(Summary(summaries[at]));
        models.push_back(std::vector<float>(models[at]));
        ASSERT_EQ(live->live_bytes(), before) << "a copy costs nothing";
      } else if (summaries.size() > 1) {
        summaries.erase(summaries.begin() + at);
        models.erase(models.begin() + at);
      }
      for (size_t i = 0; i < summaries.size(); ++i) {
        ASSERT_EQ(summaries[i].rows(), static_cast<int64_t>(models[i].size()));
        ASSERT_EQ(numbers_of(summaries[i]), models[i]);
      }
    }
    summaries.clear();
    EXPECT_EQ(live->live_bytes(), 0);
  }
}

TEST(Summary, SaysWhatAnAppendWillTake) {
  const auto live = make_host_summary_memory();
  Summary summary({kRank, kChunkTokens, DType::kInt8}, live);
  EXPECT_EQ(summary.chunks_to_append(0), 0);
  EXPECT_EQ(summary.chunks_to_append(1), 1);
  EXPECT_EQ(summary.chunks_to_append(33), 2);
  const Status appended = summary.append(10, [](Summary::Chunk& chunk, int64_t, int64_t, int64_t) {
    EXPECT_EQ(chunk.rows.size(), static_cast<size_t>(kChunkTokens * kRank));
    EXPECT_EQ(chunk.token_scale.size(), static_cast<size_t>(kChunkTokens));
  });
  EXPECT_TRUE(appended.is_ok());
  EXPECT_EQ(live->live_bytes(), kChunkTokens * kRank + kChunkTokens * 4);
  EXPECT_EQ(summary.chunks_to_append(22), 0);
  const Summary copy = summary;
  EXPECT_EQ(summary.chunks_to_append(22), 1) << "of the shared chunk";
  EXPECT_EQ(summary.chunks_to_append(23), 2);
  EXPECT_EQ(copy.chunks_to_append(0), 0);
}

}  // namespace
}  // namespace kvswap
