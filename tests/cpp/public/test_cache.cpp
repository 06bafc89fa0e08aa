// The public torch-free cache against plain attention over everything.

#include <gtest/gtest.h>

#include "public/plain_attention.h"

namespace kvswap {
namespace {

void run_chunks(Cache& session, Plain& plain, double tolerance) {
  // Longer chunks are exact; the last ones decode. One is no multiple of the groups.
  for (const int64_t tokens : {37, 50, 1, 3, 40, 1, 1}) plain.step(session, tokens, tolerance);
}

TEST(Cache, AttendsOverEverythingWhereSettingsCoverIt) {
  const Folder folder;
  Cache session(covering(folder.path()));
  Plain plain(session.options(), 2);
  run_chunks(session, plain, 1e-5);
  EXPECT_EQ(session.layer(1).positions, 133);
  EXPECT_EQ(session.held().batch, 2);
  EXPECT_GT(session.report().counters.at("records_sealed"), 0);
  EXPECT_EQ(session.report().facts.count("reader"), 1u);
  EXPECT_GT(session.report().ledger.at("total"), 0);
}

TEST(Cache, HeadsThatChooseApartAttendOverTheSame) {
  for (const int64_t batch : {1, 3}) {
    const Folder folder;
    CacheOptions options = covering(folder.path());
    options.settings.heads = "each";
    options.settings.group_tokens = 16;  // a head's record of 2 KiB
    Cache session(options);
    Plain plain(options, batch);
    for (const int64_t tokens : {37, 1, 3, 20, 1, 40, 1}) plain.step(session, tokens, 1e-4);
    EXPECT_EQ(session.held().batch, batch);
  }
}

TEST(Cache, LayersThatNeverChooseRestoreWhatTheirPagesDoNotHold) {
  for (const char* heads : {"all", "each"}) {
    for (const bool all_layers : {false, true}) {
      const Folder folder;
      CacheOptions options = covering(folder.path());
      options.settings.rows = all_layers ? "none" : "box";
      options.settings.rank = 32;  // what rows without a rank leave it at
      options.settings.exact_layers = {0, 1};
      options.settings.heads = heads;
      options.settings.io_mode = "buffered";
      options.settings.groups_max = 8;
      options.settings.pages_max = 8;
      Cache session(options);
      Plain plain(options, 2);
      plain.softcap = 0.5f;
      plain.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
      plain.pad(1, 11);
      bool valid[2 * 37];
      for (int64_t i = 0; i < 2 * 37; ++i) valid[i] = i < 37 || i >= 37 + 11;
      session.begin_pass(Pass::kPrefill, {2, 37, valid});
      // The first chunks fit into eight groups of four tokens and the tail of eight.
      for (const int64_t tokens : {37, 1, 3, 1, 40, 1, 3, 1}) plain.step(session, tokens, 1e-5);
      EXPECT_EQ(session.report().ledger.at("summary"), 0);
      EXPECT_GT(session.report().counters.at("groups_loaded"), 0);
      EXPECT_FALSE(session.layer(0).needs_projection);
    }
  }
}

TEST(Cache, CapsScoresAndHasSinksBesideThem) {
  for (const bool apart : {false, true}) {
    const Folder folder;
    CacheOptions options = covering(folder.path());
    if (apart) options.settings.heads = "each";
    options.settings.group_tokens = 16;
    Cache session(options);
    Plain plain(options, 2);
    plain.softcap = 0.5f;
    plain.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
    for (const int64_t tokens : {37, 1, 3, 20, 1}) plain.step(session, tokens, 1e-5);
  }
}

TEST(Cache, TellsWhereItsTimeWent) {
  const Folder folder;
  CacheOptions options = covering(folder.path());
  options.timeline_spans = 4096;
  Cache session(options);
  Plain plain(session.options(), 2);
  run_chunks(session, plain, 1e-5);
  const std::string trace = session.timeline();
  for (const char* kind : {"select", "attend", "attend exactly", "append", "seal", "read"}) {
    EXPECT_NE(trace.find("\"name\":\"" + std::string(kind)), std::string::npos) << kind;
  }
  EXPECT_EQ(session.report().ledger.at("timeline"), 4096 * 40);
  EXPECT_EQ(memory_need(options, 2, 200).at("timeline"), 4096 * 40);
  options.timeline_spans = 0;
  const Cache silent(options);
  EXPECT_THROW(silent.timeline(), std::invalid_argument);
}

TEST(Cache, RoundsOnceInBfloat16) {
  const Folder folder;
  Cache session(covering(folder.path(), ElementType::kBFloat16));
  Plain plain(session.options(), 1);
  run_chunks(session, plain, 2e-2);
}

TEST(Cache, LeavesPaddingOut) {
  const Folder folder;
  Cache session(covering(folder.path()));
  Plain plain(session.options(), 2);
  plain.pad(1, 11);
  bool valid[2 * 37];
  for (int64_t i = 0; i < 2 * 37; ++i) valid[i] = i < 37 || i >= 37 + 11;
  session.begin_pass(Pass::kPrefill, {2, 37, valid});
  run_chunks(session, plain, 1e-5);
}

TEST(Cache, ThreadsDoNotChangeTheAnswer) {
  const Folder folder;
  CacheOptions options = covering(folder.path());
  options.threads = [](int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    for (int64_t i = count - 1; i >= 0; --i) body(i, i + 1);
  };
  Cache session(options);
  Plain plain(options, 1);
  run_chunks(session, plain, 1e-5);
}

TEST(Cache, ReadsBackWhatItWasGiven) {
  const Folder folder;
  Cache session(covering(folder.path()));
  const ModelShape shape = session.options().shape;
  std::vector<float> keys(2 * 60 * 16), values(2 * 60 * 16);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i, values[i] = -1.0f * i;
  session.append(0, NewTokens::packed(keys.data(), values.data(), shape, 1, 60));
  std::vector<float> got(2 * 50 * 16), other(2 * 50 * 16);
  session.read_back(0, 0, 10, 60, got.data(), other.data());
  EXPECT_EQ(got[0], keys[10 * 16]);
  EXPECT_EQ(other[50 * 16 + 3], values[(60 + 10) * 16 + 3]);
  session.append(1, NewTokens::packed(keys.data(), values.data(), shape, 1, 60));
  session.crop(20);
  EXPECT_EQ(session.layer(0).positions, 20);
}

TEST(Cache, SelectsWithAProjectionAndLooksAhead) {
  const Folder folder;
  CacheOptions options = covering(folder.path());
  options.settings.groups_max = 3;
  options.settings.pages_max = 8;
  options.settings.look_ahead = "trust";
  Cache session(options);
  std::vector<float> keys(2 * 100 * 16, 0.5f);
  const auto query = Queries::packed(keys.data(), 4, 1, 16);
  std::vector<float> output(4 * 16);
  const auto tokens = NewTokens::packed(keys.data(), keys.data(), options.shape, 1, 100);
  session.append(0, tokens);
  EXPECT_TRUE(session.layer(0).needs_projection);
  session.begin_pass(Pass::kDecode);
  EXPECT_THROW(session.attend(0, query, 1, output.data()), std::invalid_argument);
  Projection projection = {32, 8, std::vector<float>(32 * 8, 0.1f), std::vector<float>(32 * 8, 1)};
  session.set_projection(0, projection);
  session.look_ahead(0, Queries::packed(keys.data(), 2, 1, 16));
  EXPECT_EQ(session.last_selection(0)[0].size(), 3u);
  session.append(0, NewTokens::packed(keys.data(), keys.data(), options.shape, 1, 1));
  session.attend(0, query, 1, output.data());
  for (const float value : output) EXPECT_NEAR(value, 0.5f, 1e-6);
  projection.keys.pop_back();
  EXPECT_THROW(session.set_projection(0, projection), std::invalid_argument);
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Cache, RefusesWrongCalls) {
  const Folder folder;
  CacheOptions options = covering(folder.path());
  Cache session(options);
  std::vector<float> data(4 * 16);
  EXPECT_NE(refusal([&] { session.layer(2).positions; }).find("layer must be 0..1, got 2"), -1ul);
  EXPECT_NE(refusal([&] {
              session.attend(0, Queries::packed(data.data(), 3, 1, 16), 1, data.data());
            }).find("query must have 4 heads, got 3"),
            -1ul);
  EXPECT_NE(refusal([&] { session.append(0, {}); }).find("append: must have keys"), -1ul);
  EXPECT_NE(refusal([&] {
              session.attend(0, Queries::packed(data.data(), 4, 20, 16), 1, data.data());
            }).find("attend: query must be of the 0 positions"),
            -1ul);
  session.close();
  session.close();
  EXPECT_THROW(session.held().batch, SessionError);
  options.settings.io_mode = "mmap";
  EXPECT_THROW(Cache{options}, std::invalid_argument);
}

TEST(Cache, TellsWhatTheWorldAndLimitsRefuse) {
  CacheOptions options = covering("/no/such/folder");
  try {
    Cache session(options);
    FAIL();
  } catch (const SessionError& error) {
    EXPECT_EQ(error.kind(), SessionError::Kind::kStorage);
    EXPECT_EQ(error.error_number(), ENOENT);
  }
  const Folder folder;
  options.directory = folder.path();
  options.budget = {.kv_memory_bytes = 1 << 20, .max_context = 100'000, .max_batch = 8};
  try {
    Cache session(options);
    FAIL();
  } catch (const SessionError& error) {
    EXPECT_EQ(error.kind(), SessionError::Kind::kBudget);
  }
  const auto need = memory_need(options, 8, 100'000, 4096);
  EXPECT_GT(need.at("total"), 1 << 20);
  EXPECT_EQ(need.at("record_bytes"), 4096);
}

}  // namespace
}  // namespace kvswap
