// The cache over tensors that C++ programs drive, against plain attention over all it was given.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kvswap/json.h"
#include "torch/projection.h"
#include "torch/tensor_cache.h"

namespace kvswap {
namespace {

constexpr int64_t kBatch = 2;
constexpr double kScale = 0.25;

int64_t positions(const TensorCache& cache) { return cache.cache().held().positions; }
std::string told(const TensorCache& cache) { return report_text(cache.cache().report()); }

class TensorCacheTest : public testing::Test {
 protected:
  TensorCacheTest() {
    at::manual_seed(11);
    path_ = std::filesystem::temp_directory_path() / "kvswap-cache-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
    args_.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};
    args_.directory = path_;
  }
  ~TensorCacheTest() override { std::filesystem::remove_all(path_); }

  void TearDown() override {
    std::filesystem::remove(path_ + "/config.json");
    EXPECT_TRUE(std::filesystem::is_empty(path_)) << "a cache leaves nothing behind";
  }

  /// Opens caches with a config file that says this.
  void configure(const std::string& settings) {
    if (!has_json()) GTEST_SKIP() << "built without nlohmann-json";
    args_.config_path = path_ + "/config.json";
    std::ofstream(args_.config_path) << R"({"version": 1, )" << settings << "}";
  }

  /// New tokens of one layer.
  struct Chunk {
    at::Tensor query, keys, values;
  };
  Chunk draw(int64_t tokens) const {
    const ModelShape& shape = args_.shape;
    const auto of = [&](int64_t heads) {
      return at::randn({kBatch, heads, tokens, shape.head_dim});
    };
    return {of(shape.heads), of(shape.kv_heads), of(shape.kv_heads)};
  }

  /// Every layer is given a chunk of its own and must answer as plain attention does.
  void pass(TensorCache& cache, int64_t tokens) {
    const bool is_short = tokens <= cache.cache().options().settings.select_queries_max;
    pass(cache, is_short ? Pass::kDecode : Pass::kPrefill, tokens);
  }
  void pass(TensorCache& cache, Pass kind, int64_t tokens) {
    cache.begin_pass(kind);
    keys_.resize(args_.shape.layers);
    values_.resize(args_.shape.layers);
    for (int64_t layer = 0; layer < args_.shape.layers; ++layer) {
      const Chunk chunk = draw(tokens);
      cache.look_ahead(layer + 1, tokens, [&] {
        ++predictions_;
        return chunk.query;
      });
      const at::Tensor output =
          cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale, terms_);
      join(keys_[layer], chunk.keys);
      join(values_[layer], chunk.values);
      const at::Tensor expected = plain(chunk.query, keys_[layer], values_[layer]);
      ASSERT_EQ(output.sizes(), expected.sizes());
      EXPECT_TRUE(at::allclose(output, expected, 1e-4, 1e-5)) << "layer " << layer;
    }
  }
  void cut(int64_t positions) {
    for (auto* each : {&keys_, &values_}) {
      for (at::Tensor& tensor : *each) tensor = tensor.narrow(2, 0, positions);
    }
  }

  OpenArgs args_;
  std::string path_;
  ScoreTerms terms_;
  int predictions_ = 0;
  std::vector<at::Tensor> keys_, values_;  // [layers]: all that was given

 private:
  static void join(at::Tensor& all, const at::Tensor& added) {
    all = all.defined() ? at::cat({all, added}, 2) : added;
  }
  /// [batch, tokens, heads, head_dim]: the newest tokens' answer, causal among themselves.
  at::Tensor plain(const at::Tensor& query, const at::Tensor& keys,
                   const at::Tensor& values) const {
    const int64_t ratio = args_.shape.heads / args_.shape.kv_heads;
    const int64_t tokens = query.size(2);
    const int64_t positions = keys.size(2);
    at::Tensor scores = query.matmul(keys.repeat_interleave(ratio, 1).transpose(2, 3)) * kScale;
    const at::Tensor later =
        at::arange(positions).unsqueeze(0) > at::arange(positions - tokens, positions).unsqueeze(1);
    if (terms_.softcap > 0) scores = (scores / terms_.softcap).tanh() * terms_.softcap;
    scores = scores.masked_fill(later, -INFINITY);
    const at::Tensor beside = terms_.sinks.value_or(at::full(args_.shape.heads, -INFINITY));
    const at::Tensor position = beside.view({1, -1, 1, 1}).expand({kBatch, -1, tokens, 1});
    scores = at::cat({position, scores}, -1).softmax(-1).narrow(-1, 1, positions);
    return scores.matmul(values.repeat_interleave(ratio, 1)).transpose(1, 2);
  }
};

TEST_F(TensorCacheTest, AttendsAsPlainAttentionDoes) {
  TensorCache cache(args_);
  EXPECT_EQ(positions(cache), 0);
  for (const int64_t tokens : {37, 1, 3, 8, 20, 1, 1}) pass(cache, tokens);
  EXPECT_EQ(positions(cache), 71);
  EXPECT_GT(cache.cache().report().counters.at("bytes_written"), 0);
  EXPECT_EQ(cache.cache().options().settings.group_tokens, SwapConfig().settings.group_tokens);
}

TEST_F(TensorCacheTest, CapsScoresAndHasSinksBesideThem) {
  terms_ = {.softcap = 0.5, .sinks = at::randn(args_.shape.heads)};
  TensorCache cache(args_);
  for (const int64_t tokens : {37, 1, 3, 20, 1}) pass(cache, tokens);
}

TEST_F(TensorCacheTest, LooksAheadWhereThatIsOfUse) {
  configure(R"("look_ahead": true, "rank": 8, "tail_tokens": 8, "true_query_layers": [0])");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  const Settings& settings = cache.cache().options().settings;
  pass(cache, settings.tail_tokens + settings.group_tokens - 1);
  cache.begin_pass(Pass::kDecode);
  EXPECT_EQ(cache.cache().wants_look_ahead(1, 1), LookAhead::kNo) << "nothing is sealed";
  pass(cache, 1);
  EXPECT_EQ(cache.cache().wants_look_ahead(1, 1), LookAhead::kAnyQuery);
  EXPECT_EQ(cache.cache().wants_look_ahead(1, settings.select_queries_max), LookAhead::kAnyQuery);
  EXPECT_EQ(cache.cache().wants_look_ahead(1, settings.select_queries_max + 1), LookAhead::kNo);
  EXPECT_EQ(cache.cache().wants_look_ahead(0, 1), LookAhead::kNo) << "it waits for its true query";
  EXPECT_EQ(cache.cache().wants_look_ahead(2, 1), LookAhead::kNo) << "there is no such layer";
  pass(cache, 1);
  EXPECT_EQ(predictions_, 0) << "everything is attended: nobody need be asked";
}

TEST_F(TensorCacheTest, PredictsAndChoosesOnceTheContextIsLong) {
  configure(R"("look_ahead": true, "rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  pass(cache, 100);  // a long chunk is exact; the projection is estimated from it
  EXPECT_FALSE(cache.cache().layer(0).needs_projection);
  cache.begin_pass(Pass::kDecode);
  const Chunk chunk = draw(1);
  cache.extend(0, chunk.query, chunk.keys, chunk.values, kScale);
  ASSERT_EQ(cache.cache().wants_look_ahead(1, 1), LookAhead::kPredicted);
  cache.look_ahead(1, 1, [&] {
    ++predictions_;
    return chunk.query;
  });
  EXPECT_EQ(predictions_, 1);
  EXPECT_TRUE(
      cache.extend(1, chunk.query, chunk.keys, chunk.values, kScale).isfinite().all().item<bool>());
  for (const auto& groups : cache.cache().last_selection(1)) EXPECT_EQ(groups.size(), 4u);
  EXPECT_NE(told(cache).find("first prefill"), std::string::npos);
}

TEST_F(TensorCacheTest, DecodingThatOutgrowsTheChoiceEstimatesFromWhatIsStored) {
  configure(R"("rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  cache.begin_pass(Pass::kDecode);
  for (int step = 0; step < 40; ++step) {
    const Chunk chunk = draw(1);
    for (const int64_t layer : {0, 1}) {
      EXPECT_TRUE(cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale)
                      .isfinite()
                      .all()
                      .item<bool>());
    }
  }
  EXPECT_FALSE(cache.cache().layer(0).needs_projection);
  EXPECT_NE(told(cache).find("first prefill"), std::string::npos);
}

TEST_F(TensorCacheTest, APrefillInPiecesOfAFewTokensIsExactAndEstimatesFromWhatIsStored) {
  configure(R"("rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  for (int piece = 0; piece < 30; ++piece) pass(cache, Pass::kPrefill, 1 + piece % 3);
  EXPECT_FALSE(cache.cache().layer(0).needs_projection);
  EXPECT_NE(told(cache).find("first prefill"), std::string::npos);
}

TEST_F(TensorCacheTest, HeadsChooseApartWithProjectionsOfTheirOwn) {
  configure(R"("heads": "each", "group_tokens": 16, "rank": 8, "groups_max": 3, "pages_max": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  pass(cache, 50);
  pass(cache, 70);  // exact over the chunk before, head by head
  EXPECT_FALSE(cache.cache().layer(0).needs_projection);
  cache.begin_pass(Pass::kDecode);
  const Chunk chunk = draw(1);
  for (const int64_t layer : {0, 1}) {
    cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale, terms_);
  }
  const auto selection = cache.cache().last_selection(0);
  ASSERT_EQ(selection.size(), static_cast<size_t>(kBatch * args_.shape.kv_heads));
  for (const auto& groups : selection) EXPECT_EQ(groups.size(), 3u);
  EXPECT_NE(told(cache).find("121 x 2, 2 decoding steps"), std::string::npos);
}

TEST_F(TensorCacheTest, EveryKindOfProjectionIsEstimatedFromThePrompt) {
  for (const std::string kind :
       {"query_aware", "svd_keys", "pca_per_head", "skewed", "channels", "rope_pairs"}) {
    configure(R"("rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8, )"
              R"("projection_kind": ")" +
              kind + "\"");
    if (IsSkipped()) return;
    keys_.clear();
    values_.clear();
    TensorCache cache(args_);
    pass(cache, 100);
    EXPECT_FALSE(cache.cache().layer(0).needs_projection) << kind;
    cache.begin_pass(Pass::kDecode);
    const Chunk chunk = draw(1);
    cache.extend(0, chunk.query, chunk.keys, chunk.values, kScale);
    EXPECT_EQ(cache.cache().last_selection(0).at(0).size(), 4u) << kind;
  }
}

TEST_F(TensorCacheTest, PaddingDoesNotWeighInAnEstimate) {
  const Chunk chunk = draw(100);
  EstimateFrom from = {.layer = 0,
                       .keys = chunk.keys.narrow(0, 0, 1).clone(),
                       .query = chunk.query.narrow(0, 0, 1).clone(),
                       .valid = at::ones({1, 100}, at::kBool),
                       .rank = 8};
  from.valid->narrow(1, 0, 20).fill_(false);
  from.keys.narrow(2, 0, 20).fill_(1e3);
  from.query->narrow(2, 0, 20).fill_(1e3);
  EstimateFrom alone = from;
  alone.keys = from.keys.narrow(2, 20, 80);
  alone.query = from.query->narrow(2, 20, 80);
  alone.valid.reset();
  for (const char* score : {"sum", "mass"}) {
    const EstimateOptions options = {.kind = "query_aware", .score = score};
    const auto padded = estimate_projection(from, options);
    const auto expected = estimate_projection(alone, options);
    EXPECT_TRUE(at::equal(padded.first, expected.first)) << score;
    EXPECT_TRUE(at::equal(padded.second, expected.second)) << score;
  }
}

TEST_F(TensorCacheTest, AProgramsOwnEstimateIsAskedOnceALayerAndToldOfPadding) {
  configure(R"("rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  std::vector<EstimateFrom> asked;
  cache.set_estimate([&](const EstimateFrom& from) {
    asked.push_back(from);
    return estimate_projection(from, {.kind = "svd_keys"});
  });
  at::Tensor valid = at::ones({kBatch, 100}, at::kBool);
  valid.narrow(0, 1, 1).narrow(1, 0, 7).fill_(false);
  cache.begin_pass(Pass::kPrefill, valid);
  for (const int64_t layer : {0, 1}) {
    const Chunk chunk = draw(100);
    cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale);
  }
  for (const int64_t layer : {0, 1}) {
    const Chunk chunk = draw(30);
    cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale);
  }
  ASSERT_EQ(asked.size(), 2u);
  ASSERT_TRUE(asked[0].valid && asked[0].query);
  EXPECT_TRUE(at::equal(*asked[0].valid, valid));
  EXPECT_EQ(asked[1].layer, 1);
}

TEST_F(TensorCacheTest, ALateEstimateIsToldOfPaddingToo) {
  configure(R"("rank": 8, "groups_max": 4, "pages_max": 8, "tail_tokens": 8)");
  if (IsSkipped()) return;
  TensorCache cache(args_);
  int asked = 0;
  cache.set_estimate([&](const EstimateFrom& from) {
    ++asked;
    EXPECT_FALSE(from.query);
    EXPECT_TRUE(from.valid && !(*from.valid)[0][0].item<bool>());
    return estimate_projection(from, {.kind = "query_aware"});
  });
  for (int step = 0; step < 40; ++step) {
    at::Tensor valid = at::ones({kBatch, 1}, at::kBool);
    if (step < 3) valid.narrow(0, 0, 1).fill_(false);
    cache.begin_pass(Pass::kDecode, valid);
    for (const int64_t layer : {0, 1}) {
      const Chunk chunk = draw(1);
      cache.extend(layer, chunk.query, chunk.keys, chunk.values, kScale);
    }
  }
  EXPECT_EQ(asked, 2) << "once a layer";
}

TEST_F(TensorCacheTest, GoesOnAfterACropAndAReset) {
  TensorCache cache(args_);
  pass(cache, 50);
  cache.cache().crop(33);
  cut(33);
  EXPECT_EQ(positions(cache), 33);
  pass(cache, 9);
  pass(cache, 1);
  cache.cache().reset();
  keys_.clear();
  values_.clear();
  EXPECT_EQ(positions(cache), 0);
  pass(cache, 30);
  pass(cache, 1);
}

TEST_F(TensorCacheTest, ReportsWhatPythonReports) {
  args_.predictor_bytes = 1 << 20;
  EXPECT_NE(told(TensorCache(args_)).find("predictor"), std::string::npos) << "by default";
  configure(R"("look_ahead": false)");
  if (IsSkipped()) return;
  EXPECT_EQ(told(TensorCache(args_)).find("predictor"), std::string::npos) << "not looking ahead";
  configure(R"("look_ahead": true)");
  TensorCache cache(args_);
  EXPECT_NE(told(cache).find("none needed so far"), std::string::npos);
  pass(cache, 40);
  pass(cache, 1);
  const std::string report = told(cache);
  for (const char* line :
       {"tokens              41 x 2, 2 decoding steps", "KV in a full cache", "KV on disk",
        "KV memory", "  predictor", "hit rate", "reader", "projection"}) {
    EXPECT_NE(report.find(line), std::string::npos) << line << " in\n" << report;
  }
}

TEST_F(TensorCacheTest, SaysWhatIsWrong) {
  {
    TensorCache cache(args_);
    const Chunk chunk = draw(3);
    const auto attend = [&](int64_t layer, const at::Tensor& keys) {
      cache.extend(layer, chunk.query, keys, chunk.values, kScale);
    };
    EXPECT_THROW(attend(2, chunk.keys), c10::ValueError);
    EXPECT_THROW(attend(-1, chunk.keys), c10::ValueError);
    EXPECT_THROW(attend(0, chunk.keys.select(0, 0)), c10::ValueError);
    EXPECT_THROW(attend(0, chunk.keys.to(at::kHalf)), c10::ValueError);
    pass(cache, 5);  // none of that was kept
    cache.cache().close();
    EXPECT_THROW(attend(0, chunk.keys), SessionError);
  }
  OpenArgs elsewhere = args_;
  elsewhere.directory = path_ + "/missing";
  EXPECT_THROW(TensorCache{elsewhere}, SessionError);
  OpenArgs configured = args_;
  configured.config_path = path_ + "/missing.json";
  EXPECT_THROW(TensorCache{configured}, ConfigError);
  OpenArgs small = args_;
  small.budget = {.kv_memory_bytes = 1, .max_context = 4096, .max_batch = 1};
  EXPECT_ANY_THROW(TensorCache{small});
}

}  // namespace
}  // namespace kvswap
