// What a program says itself: groups' scores and tokens' worth.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
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
  /// 100 tokens: 23 groups of 4 on disk, of which the first is a sink.
  void prompt(Cache& session) {
    append(session, 100);
    attend(session, 100);
  }

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

}  // namespace
}  // namespace kvswap
