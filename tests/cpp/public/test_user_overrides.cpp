// What a program says itself: groups' scores and tokens' worth; and what a step says for it.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <numeric>
#include <random>

#include "kvswap/cache.h"

namespace kvswap {
namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kDim = 16;
constexpr float kNever = -std::numeric_limits<float>::infinity();

class UserOverrides : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / "kvswap-given-XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  CacheOptions options(const std::string& rows, const std::string& keeper) const {
    CacheOptions made;
    made.shape = {.layers = 1, .heads = kHeads, .kv_heads = 2, .head_dim = kDim};
    made.settings.rows = rows;
    made.settings.keeper = keeper;
    made.settings.groups_max = 3;
    made.settings.pages_max = 8;
    made.settings.tail_tokens = 8;
    made.settings.sink_tokens = 4;
    if (keeper != "none") made.settings.keep_tokens = 2;
    made.directory = folder_;
    return made;
  }

  void append(Cache& session, int64_t tokens) {
    const std::vector<float> numbers = random(2 * tokens * kDim);
    const ModelShape shape = session.options().shape;
    begin(session, tokens);
    session.append(0, NewTokens::packed(numbers.data(), numbers.data(), shape, 1, tokens));
  }
  void attend(Cache& session, int64_t tokens) {
    const std::vector<float> query = random(kHeads * tokens * kDim);
    std::vector<float> output(query.size());
    begin(session, tokens);
    session.attend(0, Queries::packed(query.data(), kHeads, tokens, kDim), 0.25f, output.data());
  }
  /// What each of `positions` tokens received of a step of `tokens`.
  std::vector<float> weigh(Cache& session, int64_t tokens, int64_t positions) {
    const std::vector<float> query = random(kHeads * tokens * kDim);
    std::vector<float> output(query.size());
    std::vector<float> received(2 * positions);
    begin(session, tokens);
    session.attend(0, Queries::packed(query.data(), kHeads, tokens, kDim), 0.25f, output.data(), {},
                   received);
    return received;
  }
  /// 100 tokens: 23 groups of 4 on disk, of which the first is a sink.
  void prompt(Cache& session) {
    append(session, 100);
    attend(session, 100);
  }

  /// The same numbers as before come next.
  void repeat() { generator_.seed(1); }

  static void begin(Cache& session, int64_t tokens) {
    const bool is_short = tokens <= session.options().settings.select_queries_max;
    session.begin_pass(is_short ? Pass::kDecode : Pass::kPrefill);
  }

 private:
  std::vector<float> random(int64_t count) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = static_cast<float>(generator_() % 7) - 3;
    return numbers;
  }

  std::string folder_;
  std::mt19937 generator_{1};
};

TEST_F(UserOverrides, ScoresOfATextThatIsGoneChooseNothing) {
  using Change = void (*)(Cache&);
  const Change changes[] = {
      [](Cache& session) { session.reset(); }, [](Cache& session) { session.crop(40); },
      [](Cache& session) { session.select_sequences(std::vector<int64_t>{0}); }};
  for (const Change change : changes) {
    Cache session(options("given", "none"));
    prompt(session);
    session.give(0, GroupScores{std::vector<float>(23, 0.0f)});
    change(session);
    const int64_t gone = 100 - session.held().positions;
    if (gone > 0) append(session, gone);
    if (gone > 0) attend(session, gone);
    append(session, 1);
    EXPECT_TRUE(session.layer(0, 1).needs_scores);
    EXPECT_THROW(attend(session, 1), std::exception);
  }
}

TEST_F(UserOverrides, TheBestGroupsAreChosenAndSinksAreNot) {
  Cache session(options("given", "none"));
  prompt(session);
  std::vector<float> scores(23, 0.0f);
  scores[0] = 9;  // a sink
  scores[20] = 3;
  scores[7] = 2;
  append(session, 1);
  EXPECT_TRUE(session.layer(0, 1).needs_scores);
  session.give(0, GroupScores{scores});
  attend(session, 1);
  using Groups = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(session.last_selection(0), (Groups{{1, 7, 20}})) << "the lowest of equals";
  scores.assign(23, kNever);
  scores[5] = -1;
  append(session, 1);
  session.give(0, GroupScores{scores});
  attend(session, 1);
  EXPECT_EQ(session.last_selection(0), (Groups{{5}})) << "others are never worth it";
}

TEST_F(UserOverrides, ScoresAreCheckedAndAskedFor) {
  Cache session(options("given", "none"));
  prompt(session);
  append(session, 1);
  EXPECT_THROW(attend(session, 1), std::invalid_argument);
  std::vector<float> scores(23, 0.0f);
  EXPECT_THROW(session.give(0, GroupScores{std::span(scores).first(22)}), std::invalid_argument);
  EXPECT_THROW(session.give(1, GroupScores{scores}), std::invalid_argument);
  scores[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(session.give(0, GroupScores{scores}), std::invalid_argument);
  scores[3] = 0;
  session.give(0, GroupScores{scores});
  attend(session, 1);
  append(session, 1);
  EXPECT_THROW(attend(session, 1), std::invalid_argument) << "they are for one choice alone";
  Cache other(options("box", "none"));
  prompt(other);
  EXPECT_THROW(other.give(0, GroupScores{scores}), std::invalid_argument);
  EXPECT_FALSE(other.layer(0, 1).needs_scores);
}

TEST_F(UserOverrides, TheTokensThatAreWorthMostStay) {
  Cache session(options("none", "given"));
  append(session, 100);
  attend(session, 100);
  append(session, 1);
  EXPECT_THROW(attend(session, 1), std::invalid_argument) << "nothing was said of them";
  std::vector<float> worth(101, -5.0f);
  worth[50] = -1;
  session.give(0, TokenImportance{worth});
  EXPECT_THROW(session.give(0, TokenImportance{worth, std::span(worth).first(3)}),
               std::invalid_argument);
  worth[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(session.give(0, TokenImportance{worth}), std::invalid_argument);
  append(session, 1);
  attend(session, 1);
  const Report report = session.report();
  EXPECT_EQ(report.counters.at("tokens_kept"), 2);
  EXPECT_EQ(report.counters.at("groups_recalled"), 0) << "no group is selected";
  EXPECT_GT(report.counters.at("turn_bytes_read"), 0) << "who stays was on disk alone";
  EXPECT_LE(report.counters.at("turn_bytes_read"), report.counters.at("bytes_read"));
  EXPECT_NE(report_text(report).find("of kept tokens, "), std::string::npos);
  Cache other(options("none", "heavy"));
  prompt(other);
  worth.assign(100, 1.0f);
  EXPECT_THROW(other.give(0, TokenImportance{worth}), std::invalid_argument);
}

TEST_F(UserOverrides, AStepSaysWhatEachTokenReceived) {
  std::vector<std::vector<float>> of_devices;
  for (const char* device : {"cpu", "host"}) {
    CacheOptions asked = options("none", "given");
    asked.tells_attention = true;
    asked.device = device;
    repeat();
    Cache session(asked);
    prompt(session);
    std::vector<float> worth(100, 0.0f);
    worth[30] = worth[50] = 1;
    session.give(0, TokenImportance{worth});
    append(session, 2);
    const std::vector<float> received = weigh(session, 2, 102);
    for (int64_t head = 0; head < 2; ++head) {
      const auto row = std::span(received).subspan(head * 102, 102);
      EXPECT_NEAR(std::accumulate(row.begin(), row.end(), 0.0f), 1, 1e-5) << "each query's is 1";
      for (int64_t token = 0; token < 102; ++token) {
        // The first group is a sink, and the tail of 8 tokens begins with a whole group.
        const bool is_attended = token < 4 || token == 30 || token == 50 || token >= 92;
        EXPECT_EQ(row[token] > 0, is_attended) << token;
      }
    }
    of_devices.push_back(received);
  }
  for (size_t i = 0; i < of_devices[0].size(); ++i) {
    EXPECT_NEAR(of_devices[0][i], of_devices[1][i], 1e-6);
  }
}

TEST_F(UserOverrides, OnlyACacheThatTellsAttentionSaysWhatTokensReceived) {
  Cache session(options("none", "given"));
  prompt(session);
  session.give(0, TokenImportance{std::vector<float>(100, 0.0f)});
  append(session, 1);
  EXPECT_THROW(weigh(session, 1, 101), std::invalid_argument) << "not opened for it";
  CacheOptions asked = options("none", "given");
  asked.tells_attention = true;
  EXPECT_GT(memory_need(asked, 1, 200).at("total"),
            memory_need(options("none", "given"), 1, 200).at("total"));
  Cache other(asked);
  append(other, 100);
  EXPECT_THROW(weigh(other, 100, 100), std::invalid_argument) << "a prefill";
  attend(other, 100);
  other.give(0, TokenImportance{std::vector<float>(100, 0.0f)});
  append(other, 1);
  EXPECT_THROW(weigh(other, 1, 100), std::invalid_argument) << "of all tokens";
  weigh(other, 1, 101);
}

TEST_F(UserOverrides, WhatAllTokensAreWorthIsSaidAnew) {
  CacheOptions asked = options("none", "given");
  asked.tells_attention = true;
  asked.settings.keep_interval = 2;
  Cache session(asked);
  prompt(session);
  std::vector<float> worth(100, 0.0f);
  worth[30] = worth[50] = 1;
  session.give(0, TokenImportance{worth});
  worth.push_back(0);
  const auto all = TokenImportance::Of::kAll;
  append(session, 1);
  EXPECT_THROW(session.give(0, TokenImportance{.worth = worth, .of = all}), std::invalid_argument)
      << "before it was said what the new token is worth";
  for (int64_t step = 0; step < 4; ++step) {
    if (step > 0) append(session, 1);
    const std::vector<float> received = weigh(session, 1, 101 + step);
    // The second refresh, after two steps, goes by what the first one's end said.
    EXPECT_EQ(received[30] > 0 && received[50] > 0, step < 2) << step;
    EXPECT_EQ(received[20] > 0 && received[40] > 0, step >= 2) << step;
    const float zero = 0;
    session.give(0, TokenImportance{std::span(&zero, 1)});
    if (step > 0) continue;
    EXPECT_THROW(session.give(0, TokenImportance{.worth = std::span(worth).first(9), .of = all}),
                 std::invalid_argument);
    worth.assign(101, 0.0f);
    std::vector<float> decay(101, 0.0f);
    worth[10] = 9, decay[10] = 5;  // 9 - 2 * 5 at the refresh
    worth[20] = worth[40] = 2;
    session.give(0, TokenImportance{.worth = worth, .decay = decay, .of = all});
  }
}

}  // namespace
}  // namespace kvswap
