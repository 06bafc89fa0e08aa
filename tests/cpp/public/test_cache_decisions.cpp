// What a cache decides by itself, and what it does on a device without torch.

#include <gtest/gtest.h>

#include <limits>

#include "public/plain_attention.h"

namespace kvswap {
namespace {

TEST(CacheOnADevice, AnswersAsOnTheHostWithoutTorch) {
  for (const char* heads : {"all", "each"}) {
    for (const bool extends : {false, true}) {
      const Folder folder;
      CacheOptions options = covering(folder.path());
      options.device = "host";
      options.settings.heads = heads;
      options.settings.group_tokens = 16;
      Cache cache(options);
      EXPECT_NE(cache.report().facts.at("device"), "cpu");
      Plain plain(options, 2);
      plain.extends = extends;
      plain.softcap = 0.5f;
      plain.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
      plain.pad(1, 11);
      bool valid[2 * 37];
      for (int64_t i = 0; i < 2 * 37; ++i) valid[i] = i < 37 || i >= 37 + 11;
      cache.begin_pass(Pass::kPrefill, {2, 37, valid});
      for (const int64_t tokens : {37, 1, 3, 20, 1}) plain.step(cache, tokens, 1e-5);
    }
  }
}

TEST(CacheOnADevice, TheProgramsStreamIsAskedForInEveryCall) {
  const Folder folder;
  CacheOptions options = covering(folder.path());
  options.device = "host";
  int asked = 0;
  options.stream = [&]() -> void* {
    ++asked;
    return nullptr;
  };
  Cache cache(options);
  (void)cache.held();
  EXPECT_EQ(asked, 1);
  (void)cache.report();
  EXPECT_EQ(asked, 2);
}

/// Layers of a cache that chooses among its groups.
class Decisions : public testing::Test {
 protected:
  Decisions() {
    options_ = covering(folder_.path());
    options_.settings.groups_max = 3;
    options_.settings.pages_max = 8;
    options_.settings.look_ahead = "trust";
  }

  void append(Cache& cache, int64_t tokens) {
    cache.begin_pass(Pass::kPrefill);
    for (int64_t layer = 0; layer < options_.shape.layers; ++layer) {
      cache.append(layer,
                   NewTokens::packed(numbers_.data(), numbers_.data(), options_.shape, 1, tokens));
    }
  }
  static Projection pair() {
    return {32, 8, std::vector<float>(32 * 8, 0.1f), std::vector<float>(32 * 8, 1)};
  }

  const Folder folder_;
  CacheOptions options_;
  const std::vector<float> numbers_ = std::vector<float>(4 * 100 * 16, 0.5f);
};

TEST_F(Decisions, ALookAheadIsWantedWhereItCouldBeOfUse) {
  options_.settings.true_query_layers = {0};
  options_.settings.exact_layers = {};
  Cache cache(options_);
  append(cache, 11);
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kNo) << "nothing is sealed";
  append(cache, 1);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kNo) << "it is a prefill";
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kAnyQuery);
  EXPECT_EQ(cache.wants_look_ahead(0, 1), LookAhead::kNo) << "it waits for its true query";
  EXPECT_EQ(cache.wants_look_ahead(2, 1), LookAhead::kNo) << "there is no such layer";
  EXPECT_EQ(cache.wants_look_ahead(1, options_.settings.select_queries_max + 1), LookAhead::kNo);
  cache.look_ahead(1, {.tokens = 1});
  append(cache, 88);
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kPredicted);
  EXPECT_THROW(cache.look_ahead(1, {.tokens = 1}), std::invalid_argument) << "not any will do";
}

TEST_F(Decisions, ALayerThatNeverChoosesIsNotPredicted) {
  options_.settings.exact_layers = {1};
  Cache cache(options_);
  append(cache, 12);
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kAnyQuery);
  append(cache, 88);
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.wants_look_ahead(1, 1), LookAhead::kNo);
  EXPECT_EQ(cache.wants_estimate(1, 100), EstimateWanted::kNo);
}

TEST_F(Decisions, AnEstimateIsWantedUntilThereIsOneAndAgainWhenItsTokensAreGone) {
  Cache cache(options_);
  EXPECT_EQ(cache.wants_estimate(0, 23), EstimateWanted::kNo) << "three groups and a tail";
  EXPECT_EQ(cache.wants_estimate(0, 24), EstimateWanted::kFromChunk);
  EXPECT_EQ(cache.wants_estimate(0, 1), EstimateWanted::kIfOutgrown);
  cache.set_projection(0, pair(), ProjectionSource::kEstimated);
  cache.set_projection(1, pair());
  append(cache, 24);
  EXPECT_EQ(cache.wants_estimate(0, 50), EstimateWanted::kNo);
  EXPECT_EQ(cache.report().projections, ProjectionSource::kGiven);
  const std::unique_ptr<Cache> forked = cache.fork();
  EXPECT_EQ(forked->wants_estimate(0, 50), EstimateWanted::kNo);
  forked->reset();
  EXPECT_EQ(forked->wants_estimate(0, 50), EstimateWanted::kFromChunk);
  EXPECT_EQ(forked->wants_estimate(1, 50), EstimateWanted::kNo) << "it was calibrated";
  cache.crop(20);
  EXPECT_EQ(cache.wants_estimate(0, 50), EstimateWanted::kNo) << "some of them are there";
  cache.crop(0);
  EXPECT_EQ(cache.wants_estimate(0, 50), EstimateWanted::kFromChunk);
}

TEST_F(Decisions, AnEstimateOfWhatIsThereGoesWhenSomeOfItIsTakenBack) {
  Cache cache(options_);
  append(cache, 100);
  ASSERT_TRUE(cache.layer(0).needs_projection);
  cache.set_projection(0, pair(), ProjectionSource::kEstimated);
  EXPECT_FALSE(cache.layer(0).needs_projection);
  cache.crop(100);
  EXPECT_EQ(cache.wants_estimate(0, 50), EstimateWanted::kNo) << "nothing was taken back";
  cache.crop(99);
  EXPECT_EQ(cache.wants_estimate(0, 50), EstimateWanted::kFromChunk);
}

TEST_F(Decisions, ALongChunkThatThrowsLeavesNothingAndMayBeExtendedAgain) {
  options_.budget = {.kv_memory_bytes = memory_need(options_, 1, 60).at("total"),
                     .max_context = 60,
                     .max_batch = 1};
  Cache cache(options_);
  std::vector<float> output(4 * 100 * 16);
  const auto extend = [&](int64_t tokens) {
    cache.extend(0, NewTokens::packed(numbers_.data(), numbers_.data(), options_.shape, 1, tokens),
                 Queries::packed(numbers_.data(), 4, tokens, 16), 0.25f, output.data());
  };
  extend(40);
  EXPECT_THROW(extend(100), SessionError);
  EXPECT_EQ(cache.layer(0).positions, 40);
  extend(20);
  EXPECT_EQ(cache.layer(0).positions, 60);
  for (int64_t i = 0; i < 4 * 20 * 16; ++i) ASSERT_NEAR(output[i], 0.5f, 1e-6);
}

TEST_F(Decisions, PaddingIsTold) {
  Cache cache(options_);
  EXPECT_FALSE(cache.has_padding(0, 9));
  const bool valid[2 * 3] = {true, true, true, false, false, true};
  cache.begin_pass(Pass::kPrefill, {2, 3, valid});
  bool told[2 * 2] = {};
  EXPECT_TRUE(cache.has_padding(1, 3, told)) << "declared, and not appended yet";
  EXPECT_TRUE(told[0] && told[1] && !told[2] && told[3]);
  EXPECT_FALSE(cache.has_padding(2, 9));
}

TEST_F(Decisions, TheReportIsReadableAndOneBatchIsOneBatch) {
  options_.predictor_bytes = 1 << 20;
  Cache cache(options_);
  append(cache, 40);
  const std::string report = report_text(cache.report());
  for (const char* line : {"tokens              40 x 1, 0 decoding steps", "  predictor",
                           "projection          none needed so far"}) {
    EXPECT_NE(report.find(line), std::string::npos) << line << " in\n" << report;
  }
  Queries query = Queries::packed(numbers_.data(), 4, 1, 16);
  query.batch = 2;
  EXPECT_THROW(cache.look_ahead(0, query), std::invalid_argument);
  std::vector<float> output(2 * 4 * 16);
  EXPECT_THROW(cache.attend(0, query, 0.25f, output.data()), std::invalid_argument);
}

}  // namespace
}  // namespace kvswap
