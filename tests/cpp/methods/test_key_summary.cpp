#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <utility>

#include "methods/summary/key_summary.h"

namespace kvswap {
namespace {

constexpr int64_t kRank = 3;
constexpr int64_t kChunkTokens = 480;  // full, part of a room and odd rooms all occur

/// Appends rows whose one number (rank 0) is given, block by block.
void append(KeySummary& summary, const std::vector<float>& numbers) {
  const Status appended = summary.append(
      static_cast<int64_t>(numbers.size()),
      [&](KeySummary::Chunk& chunk, int64_t first_row, int64_t first_token, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = first_row + i;
          const int64_t at = row / 16 * kRank * 16 + row % 16;
          std::memcpy(chunk.rows.data() + at * sizeof(float), &numbers[first_token + i],
                      sizeof(float));
        }
      });
  EXPECT_TRUE(appended.is_ok()) << appended.message();
}

void append_zeros(KeySummary& summary, int64_t tokens) {
  const Status appended =
      summary.append(tokens, [](KeySummary::Chunk& chunk, int64_t, int64_t, int64_t) {
        EXPECT_EQ(chunk.token_scale.size(), chunk.token_scale.empty() ? 0u : size_t(chunk.room));
      });
  EXPECT_TRUE(appended.is_ok()) << appended.message();
}

std::vector<float> numbers_of(const KeySummary& summary) {
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

TEST(KeySummary, CopiesShareUntilTheyDifferAndEachSeesItsOwnRows) {
  const KeySummary::Shape shape = {kRank, kChunkTokens, DType::kFloat32};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto live = make_host_summary_memory();
    std::vector<KeySummary> summaries(1, KeySummary(shape, live));
    std::vector<std::vector<float>> models(1);
    for (int step = 0; step < 200; ++step) {
      const size_t at = random() % summaries.size();
      if (const uint32_t action = random() % 8; action < 5) {
        std::vector<float> numbers(random() % 400);
        for (float& number : numbers) number = static_cast<float>(random() % 1000);
        append(summaries[at], numbers);
        models[at].insert(models[at].end(), numbers.begin(), numbers.end());
      } else if (action < 6) {
        models[at].resize(random() % (models[at].size() + 1));
        summaries[at].truncate(static_cast<int64_t>(models[at].size()));
      } else if (action < 7 && summaries.size() < 5) {
        const int64_t before = live->live_bytes();
        summaries.push_back(KeySummary(summaries[at]));
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

int64_t next_bytes(const KeySummary& summary, int64_t tokens) {
  std::set<const KeySummary::Chunk*> settled;
  return summary.bytes_to_append(tokens, &settled);
}

TEST(KeySummary, SaysWhatAnAppendWillTakeHoweverItComes) {
  for (const DType dtype : {DType::kFloat32, DType::kInt8, DType::kInt4}) {
    const KeySummary::Shape shape = {kRank, 1024, dtype};
    std::mt19937 random(7);
    const auto live = make_host_summary_memory();
    KeySummary summary(shape, live);
    EXPECT_EQ(next_bytes(summary, 0), 0);
    for (int step = 0; step < 100; ++step) {
      const int64_t tokens = 1 + static_cast<int64_t>(random() % (step % 9 == 0 ? 3000 : 40));
      const int64_t expected = live->live_bytes() + next_bytes(summary, tokens);
      append_zeros(summary, tokens);
      ASSERT_EQ(live->live_bytes(), expected);
      ASSERT_EQ(expected, shape.bytes(summary.rows())) << "in one piece or in many";
      if (step % 20 == 19) summary = KeySummary(shape, live);
    }
  }
}

TEST(KeySummary, WastesLittle) {
  for (const int64_t rank : {8, 12, 16, 32, 64, 96}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kInt4}) {
      const KeySummary::Shape shape = {rank, 1024, dtype};
      const int64_t token = row_bytes(dtype, rank) + (has_row_scales(dtype) ? 4 : 0);
      if (token % 4 != 0) continue;  // a full chunk ends inside a memory page
      for (int64_t rows = 1; rows < 20000; rows += 61) {
        const int64_t payload = rows * token;
        ASSERT_GE(shape.bytes(rows), payload);
        const int64_t room = 128 * token + 4096;
        ASSERT_LE(shape.bytes(rows), payload + room) << "one step of growth and a memory page";
        ASSERT_GE(shape.bytes(rows + 1), shape.bytes(rows));
        if (rows > 5000) {
          ASSERT_LE(static_cast<double>(shape.bytes(rows)), payload * 1.03 + 4096);
        }
      }
    }
  }
}

TEST(KeySummary, ASharedChunkStaysWithItsLastOwner) {
  const KeySummary::Shape shape = {kRank, 1024, DType::kInt8};
  const auto live = make_host_summary_memory();
  KeySummary one(shape, live);
  append_zeros(one, 10);
  const int64_t room = one.chunk(0).room;
  ASSERT_GE(room, 128);
  KeySummary two = one;
  for (const int64_t tokens : {room - 10, room - 9}) {
    std::set<const KeySummary::Chunk*> settled;
    const int64_t of_one = one.bytes_to_append(tokens, &settled);
    const int64_t of_two = two.bytes_to_append(tokens, &settled);
    EXPECT_EQ(of_one, shape.bytes(10 + tokens) - shape.bytes(10));
    EXPECT_EQ(of_two, shape.bytes(10 + tokens));
  }
  append_zeros(one, room - 10);
  EXPECT_EQ(live->live_bytes(), 2 * shape.bytes(10)) << "a copy";
  append_zeros(two, room - 10);
  EXPECT_EQ(live->live_bytes(), 2 * shape.bytes(10)) << "the last one has it for itself";
}

/// Counts what is not freed, of all memories together.
class CountedMemory final : public SummaryMemory {
 public:
  explicit CountedMemory(std::atomic<int64_t>& bytes) : bytes_(bytes) {}
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void upload(std::byte* to, const void* host, int64_t bytes) override {
    std::memcpy(to, host, bytes);
  }
  Status download(void* host, const std::byte* from, int64_t bytes) override {
    std::memcpy(host, from, bytes);
    return Status::ok();
  }

 protected:
  std::byte* take(int64_t bytes) override {
    bytes_ += bytes;
    return static_cast<std::byte*>(std::calloc(1, bytes));
  }
  void let_go(std::byte* memory, int64_t bytes) override {
    bytes_ -= bytes;
    std::free(memory);
  }

 private:
  std::atomic<int64_t>& bytes_;
};

/// A summary with a memory of its own, and what it must hold.
struct Fork {
  std::shared_ptr<CountedMemory> memory;
  KeySummary summary;
  std::vector<float> model;
};

Fork fork_of(Fork& from, std::atomic<int64_t>& bytes) {
  const auto memory = std::make_shared<CountedMemory>(bytes);
  Fork fork = {memory, KeySummary(from.summary.shape(), memory), from.model};
  std::vector<std::shared_ptr<KeySummary::Chunk>> chunks;
  for (int64_t i = 0; i < from.summary.chunks(); ++i) {
    chunks.push_back(fork.summary.share_chunk(from.summary.chunk(i)));
  }
  fork.summary.take(std::move(chunks), from.summary.rows());
  return fork;
}

TEST(KeySummary, ForksCountWhatTheyShareOnceInWhateverOrderTheyGo) {
  const KeySummary::Shape shape = {kRank, kChunkTokens, DType::kFloat32};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::atomic<int64_t> bytes = 0;
    std::vector<Fork> forks;
    const auto first = std::make_shared<CountedMemory>(bytes);
    forks.push_back({first, KeySummary(shape, first), {}});
    for (int step = 0; step < 200; ++step) {
      const size_t at = random() % forks.size();
      Fork& fork = forks[at];
      if (const uint32_t action = random() % 8; action < 4) {
        std::vector<float> numbers(random() % 400);
        for (float& number : numbers) number = static_cast<float>(random() % 1000);
        const int64_t said = fork.memory->live_bytes() +
                             next_bytes(fork.summary, static_cast<int64_t>(numbers.size()));
        append(fork.summary, numbers);
        fork.model.insert(fork.model.end(), numbers.begin(), numbers.end());
        ASSERT_EQ(fork.memory->live_bytes(), said) << "what was charged ahead";
      } else if (action < 5) {
        fork.model.resize(random() % (fork.model.size() + 1));
        fork.summary.truncate(static_cast<int64_t>(fork.model.size()));
      } else if (action < 7 && forks.size() < 6) {
        const int64_t before = bytes;
        forks.push_back(fork_of(fork, bytes));
        ASSERT_EQ(bytes, before) << "a fork costs nothing";
        ASSERT_EQ(forks.back().memory->live_bytes(), forks[at].memory->live_bytes());
        ASSERT_EQ(forks.back().memory->shared_bytes(), forks.back().memory->live_bytes());
      } else if (forks.size() > 1) {
        forks.erase(forks.begin() + at);
      }
      int64_t counted = 0;
      for (const Fork& each : forks) {
        ASSERT_EQ(numbers_of(each.summary), each.model);
        counted += each.memory->live_bytes() - each.memory->shared_bytes();
      }
      ASSERT_EQ(counted, bytes) << "each byte in one account";
    }
    forks.clear();
    EXPECT_EQ(bytes, 0);
  }
}

/// Blocks as they are saved: all columns of a block together.
std::vector<std::byte> blocks_of(const KeySummary& summary, const KeySummary::Chunk& chunk,
                                 int64_t blocks) {
  std::vector<std::byte> bytes(blocks * kRank * 16 * sizeof(float));
  EXPECT_TRUE(summary.download_blocks(chunk, 0, blocks, bytes.data()).is_ok());
  return bytes;
}

TEST(KeySummary, ColumnsThatStandApartAreSavedLoadedAndMovedTogether) {
  const KeySummary::Shape shape = {kRank, 1024, DType::kFloat32, 1};
  EXPECT_EQ(shape.rest_columns(), kRank - 1);
  EXPECT_EQ(shape.bytes(700), (KeySummary::Shape{kRank, 1024, DType::kFloat32}.bytes(700)));
  const auto live = make_host_summary_memory();
  KeySummary summary(shape, live);
  for (const int64_t tokens : {16, 16, 96, 400}) {  // the chunk moves where it grows
    const Status appended =
        summary.append(tokens, [](KeySummary::Chunk& chunk, int64_t row, int64_t, int64_t count) {
          const auto fill = [&](std::span<std::byte> part, int64_t columns, float first) {
            auto* numbers = reinterpret_cast<float*>(part.data());
            for (int64_t at = row * columns; at < (row + count) * columns; ++at) {
              numbers[at] = first + static_cast<float>(at);
            }
          };
          fill(chunk.rows, 1, 0);
          fill(chunk.rest, kRank - 1, 10000);
        });
    ASSERT_TRUE(appended.is_ok()) << appended.message();
  }
  const int64_t blocks = summary.rows() / 16;
  const std::vector<std::byte> saved = blocks_of(summary, summary.chunk(0), blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t at = 0; at < kRank * 16; ++at) {
      const int64_t number = at < 16 ? block * 16 + at : 10000 + block * (kRank - 1) * 16 + at - 16;
      float found = 0;
      std::memcpy(&found, saved.data() + (block * kRank * 16 + at) * sizeof(float), sizeof(float));
      ASSERT_EQ(found, static_cast<float>(number));
    }
  }
  for (const int64_t first_columns : {0, 1, 2}) {
    KeySummary::Shape other = shape;
    other.first_columns = first_columns;
    const KeySummary loader(other, live);
    const auto loaded = loader.load_chunk(summary.rows(), saved, {});
    ASSERT_TRUE(loaded.is_ok());
    EXPECT_EQ(blocks_of(loader, *loaded.value(), blocks), saved);
  }
}

}  // namespace
}  // namespace kvswap
