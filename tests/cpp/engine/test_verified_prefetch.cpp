// Predicted queries prefetch, and change no choice (look_ahead=verify).

#include <map>
#include <optional>

#include "cluster_lives.h"
#include "device/host_device.h"
#include "engine/report/engine_report.h"
#include "engine_run.h"
#include "io/faulty_kernel.h"
#include "random_life.h"

namespace kvswap {
namespace {

constexpr int64_t kSequences = 3;
constexpr int64_t kPrompt = 150;

/// What predictions are made of the true query.
enum class Prediction { kNone, kRight, kNear, kWrong };

EngineOptions three_layers(const std::string& directory) {
  EngineOptions options = small_options(directory);
  options.layers = 3;
  options.ranks = {5, 8, 6};
  options.groups_max = 6;
  options.pages_max = 12;
  options.tail_tokens = 4;
  options.look_ahead = "verify";
  return options;
}

/// Decodes with queries that change little from step to step, and predicts the next layer's as a
/// program does. Whatever is drawn does not depend on the engine.
class Decoding {
 public:
  Decoding(const EngineOptions& options, Prediction prediction, ParallelFor parallel = nullptr)
      : options_(options), prediction_(prediction), run_(options, 21, std::move(parallel)) {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const Tokens tokens = run_.draw_tokens(kSequences, kPrompt);
      EXPECT_TRUE(run_.give(layer, tokens, kSequences).is_ok());
      if (!options_.ranks.empty()) {
        EXPECT_TRUE(run_.set_projection(layer).is_ok());
      }
      queries_.push_back(run_.draw_query(kSequences, 1));
    }
  }

  Engine& engine() { return run_.engine(); }
  EngineRun& run() { return run_; }
  const EngineCounters& counters() { return engine().context().counters; }
  AdaptivePrefetch::Counts counts() { return engine().context().adaptive_prefetch.total(); }

  void look_ahead(int64_t layer) {
    std::vector<float> predicted = queries_[layer];
    if (prediction_ == Prediction::kNear) change(predicted, 6);
    if (prediction_ == Prediction::kWrong) change(predicted, std::ssize(predicted));
    if (prediction_ == Prediction::kNone) return;
    const Status ahead = run_.ask(layer, predicted, 1);
    ASSERT_TRUE(ahead.is_ok()) << ahead.message();
  }

  void step(FaultyKernel* kernel = nullptr) {
    for (auto& query : queries_) change(query, 3);
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      if (layer + 1 < options_.layers) look_ahead(layer + 1);
      const Tokens tokens = run_.draw_tokens(kSequences, 1);
      const Status given = run_.give(layer, tokens, kSequences);
      ASSERT_TRUE(given.is_ok()) << given.message();
      std::vector<std::byte> output;
      Status attended = run_.attend(layer, queries_[layer], 1, output);
      if (!attended.is_ok() && kernel != nullptr) {
        ++refused_;
        EXPECT_EQ(attended.code(), StatusCode::kStorage) << attended.message();
        kernel->heal();
        attended = run_.attend(layer, queries_[layer], 1, output);
      }
      ASSERT_TRUE(attended.is_ok()) << attended.message();
      const auto& chosen = engine().last_selection(layer);
      chosen_.insert(chosen_.end(), chosen.begin(), chosen.end());
      outputs_.insert(outputs_.end(), output.begin(), output.end());
    }
  }
  Decoding& steps(int count) {
    for (int i = 0; i < count && !testing::Test::HasFatalFailure(); ++i) step();
    return *this;
  }

  const std::vector<std::vector<int32_t>>& chosen() const { return chosen_; }
  const std::vector<std::byte>& outputs() const { return outputs_; }
  int refused() const { return refused_; }

 private:
  void change(std::vector<float>& query, int64_t numbers) {
    for (int64_t i = 0; i < numbers; ++i) {
      query[run_.draw(0, std::ssize(query) - 1)] = static_cast<float>(run_.draw(-2, 2));
    }
  }

  EngineOptions options_;
  Prediction prediction_;
  EngineRun run_;
  std::vector<std::vector<float>> queries_;  // [layers]
  std::vector<std::vector<int32_t>> chosen_;
  std::vector<std::byte> outputs_;
  int refused_ = 0;
};

/// Both ways through the same steps; returns what verify has counted.
AdaptivePrefetch::Counts expect_same(EngineOptions options, Prediction prediction, int steps = 10) {
  options.look_ahead = "off";
  Decoding alone(options, prediction);
  options.look_ahead = "verify";
  Decoding verified(options, prediction);
  alone.steps(steps);
  verified.steps(steps);
  EXPECT_EQ(verified.chosen(), alone.chosen());
  EXPECT_EQ(verified.outputs(), alone.outputs());
  EXPECT_EQ(verified.counters().groups_attended, alone.counters().groups_attended);
  return verified.counts();
}

struct Place {
  const char* reader;
  bool is_on_device;
};

class VerifiedPrefetch : public testing::TestWithParam<Place> {
 protected:
  EngineOptions options() const {
    EngineOptions options = three_layers(directory_.path());
    options.reader = GetParam().reader;
    if (GetParam().is_on_device) options.device = host_device({.delay_us_max = 100});
    return options;
  }

  const TestDirectory directory_;
};

TEST_P(VerifiedPrefetch, ChoosesAsTheTrueQueryAlone) {
  for (const char* score : {"sum", "max", "mass", "max_mass"}) {
    for (const Prediction prediction :
         {Prediction::kRight, Prediction::kNear, Prediction::kWrong}) {
      SCOPED_TRACE(std::string(score) + ", prediction " + std::to_string(int(prediction)));
      EngineOptions asked = options();
      asked.score = score;
      const auto counts = expect_same(asked, prediction);
      EXPECT_GT(counts.hits + counts.wasted, 0u);
      EXPECT_EQ(counts.dropped, 0u);
    }
  }
}

TEST_P(VerifiedPrefetch, ChoosesSoOverEveryKindOfRowsAndReplacement) {
  const auto near = [&](EngineOptions asked) { return expect_same(asked, Prediction::kNear); };
  for (const char* rows : {"box", "mean"}) {
    SCOPED_TRACE(rows);
    EngineOptions asked = options();
    asked.rows = rows;
    asked.ranks = {};
    asked.score = "max";
    EXPECT_GT(near(asked).hits, 0u);
  }
  for (const char* replacement : {"fifo", "lru", "unused", "none", "score"}) {
    SCOPED_TRACE(replacement);
    EngineOptions asked = options();
    asked.replacement = replacement;
    EXPECT_GT(near(asked).hits, 0u);
  }
  EngineOptions each = options();
  each.heads = "each";
  each.head_dim *= 2;
  EXPECT_GT(near(each).hits, 0u);
  EngineOptions shared = options();
  shared.resident_layers = 2;
  for (const int64_t pages : {6, 8, 20}) {
    SCOPED_TRACE(pages);
    shared.pages_max = pages;
    EXPECT_GT(near(shared).hits, 0u);
  }
}

TEST_P(VerifiedPrefetch, ARandomLifeIsThatWithoutIt) {
  const auto live = [&](EngineOptions asked, const char* look_ahead) {
    asked.look_ahead = look_ahead;
    EngineRun run(asked, 5);
    run.live(60, 3);
    return run.outputs();
  };
  EXPECT_TRUE(live(options(), "verify") == live(options(), "off"));
  EngineOptions shared = options();
  shared.resident_layers = 2;
  EXPECT_TRUE(live(shared, "verify") == live(shared, "off"));
}

INSTANTIATE_TEST_SUITE_P(Everywhere, VerifiedPrefetch,
                         testing::Values(Place{"sync", false}, Place{"threads", false},
                                         Place{"auto", false}, Place{"sync", true},
                                         Place{"auto", true}),
                         [](const auto& info) {
                           return std::string(info.param.reader) +
                                  (info.param.is_on_device ? "_device" : "_host");
                         });

TEST(Prefetch, RandomLivesOfEveryShapeAreThoseWithoutIt) {
  const std::vector<Shape> of_float8 = rounded_shapes("fp8");
  const std::vector<Shape> of_int4 = rounded_shapes("int4");
  for (const auto& shapes : {std::span<const Shape>(kShapes), std::span<const Shape>(kSharedPages),
                             std::span<const Shape>(of_float8), std::span<const Shape>(of_int4),
                             std::span<const Shape>(kNarrowValues)}) {
    for (const Shape& shape : shapes) {
      SCOPED_TRACE(shape.name);
      const TestDirectory directory;
      const auto live = [&](const char* look_ahead) {
        EngineOptions options = options_of(shape, directory.path());
        options.look_ahead = look_ahead;
        EngineRun run(options, 9);
        run.live(lives(15, 30), shape.batch_max);
        return run.outputs();
      };
      EXPECT_TRUE(live("verify") == live("off"));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

/// The run judges each choice by what the layer's own query would choose.
TEST(Prefetch, ClustersAreChosenByTheTrueQuery) {
  for (const ClusterLife& life : cluster_lives()) {
    SCOPED_TRACE(life.name);
    const TestDirectory directory;
    EngineOptions options = life.adapt(cluster_options(directory.path()));
    options.look_ahead = "verify";
    ClusterRun run(options, 4);
    run.live(lives(30, 60));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Prefetch, WhatIsPredictedRightIsThereWhenItIsChosen) {
  const TestDirectory directory;
  Decoding decoding(three_layers(directory.path()), Prediction::kRight);
  decoding.steps(8);
  const auto counts = decoding.counts();
  EXPECT_GT(counts.hits, 0u);
  EXPECT_EQ(counts.wasted, 0u);
  EXPECT_EQ(counts.hits, decoding.counters().groups_prefetched);
  // The first layer alone has none before it that could predict it.
  Decoding without(three_layers(directory.path()), Prediction::kNone);
  without.steps(8);
  EXPECT_EQ(without.counters().groups_prefetched, 0u);
  EXPECT_EQ(without.counters().groups_loaded,
            decoding.counters().groups_loaded + decoding.counters().groups_prefetched);
  EXPECT_EQ(decoding.engine().context().fetcher->counters().records,
            without.engine().context().fetcher->counters().records);
}

TEST(Prefetch, WhatWasReadInVainStaysInTheReuseBuffer) {
  const TestDirectory directory;
  EngineOptions options = three_layers(directory.path());
  options.pages_max = 40;  // nothing has to leave
  options.groups_max = 4;
  Decoding decoding(options, Prediction::kWrong);
  decoding.steps(20);
  const auto counts = decoding.counts();
  EXPECT_GT(counts.wasted, counts.hits);
  options.look_ahead = "off";
  Decoding without(options, Prediction::kWrong);
  without.steps(20);
  EXPECT_EQ(decoding.chosen(), without.chosen());
  // What one step reads in vain a later one finds.
  EXPECT_LT(decoding.counters().groups_loaded + counts.hits, without.counters().groups_loaded);
}

TEST(Prefetch, IsReadBehindWhatTheLayerBeforeLacks) {
  for (const bool is_on_device : {false, true}) {
    const TestDirectory directory;
    EngineOptions options = three_layers(directory.path());
    options.replacement = "none";  // every layer reads in every step
    options.timeline_spans = 1 << 12;
    if (is_on_device) options.device = host_device({});
    Decoding decoding(options, Prediction::kWrong);
    decoding.steps(3);
    const size_t begin = decoding.engine().context().timeline->spans().size();
    decoding.step();
    std::vector<int64_t> submitted;
    const std::vector<Span> spans = decoding.engine().context().timeline->spans();
    for (size_t i = begin; i < spans.size(); ++i) {
      if (spans[i].kind == SpanKind::kSubmit) submitted.push_back(spans[i].layer);
    }
    // Each layer's own; then the next one's prefetch.
    EXPECT_EQ(submitted, (std::vector<int64_t>{0, 1, 1, 2, 2})) << is_on_device;
  }
}

TEST(Prefetch, AFaultIsDroppedAndCountedAndTheChoiceReadsAgain) {
  const TestDirectory directory;
  for (const char* reader : {"sync", "threads", "auto"}) {
    EngineOptions options = three_layers(directory.path());
    options.reader = reader;
    options.merge_gap_bytes = 0;
    options.merge_bytes_max = 4096;  // one read a record
    Decoding well(options, Prediction::kNear);
    well.steps(6);
    uint64_t dropped = 0;
    int refused = 0;
    for (const bool is_lasting : {false, true}) {
      for (uint64_t nth = 1; nth < 60 && !testing::Test::HasFatalFailure(); nth += 3 * stride(2)) {
        SCOPED_TRACE(std::string(reader) + ", read " + std::to_string(nth));
        Decoding struck(options, Prediction::kNear);
        struck.steps(2);
        FaultyKernel kernel;
        kernel.arm(
            {.call = KernelCall::kRead, .nth = nth, .is_lasting = is_lasting, .error_number = EIO});
        for (int i = 0; i < 4; ++i) struck.step(&kernel);
        kernel.heal();
        EXPECT_EQ(struck.chosen(), well.chosen());
        EXPECT_EQ(struck.outputs(), well.outputs());
        dropped += struck.counts().dropped;
        refused += struck.refused();
      }
    }
    EXPECT_GT(dropped, 0u) << reader;
    EXPECT_GT(refused, 0) << "a layer's own error is reported, " << reader;
  }
}

TEST(Prefetch, WhatChangesTheCacheTakesItBack) {
  const TestDirectory directory;
  for (const bool is_shared : {false, true}) {
    EngineOptions options = three_layers(directory.path());
    if (is_shared) options.resident_layers = 2;
    const auto life = [&](const char* look_ahead) {
      options.look_ahead = look_ahead;
      Decoding decoding(options, Prediction::kNear);
      decoding.steps(3);
      Engine& engine = decoding.engine();
      // Each with prefetches of two layers in flight, or waiting behind the layer before.
      const auto in_flight = [&] {
        decoding.look_ahead(1);
        decoding.look_ahead(2);
      };
      in_flight();
      EXPECT_TRUE(engine.crop(engine.positions(0) - 5).is_ok());
      decoding.steps(1);
      in_flight();
      EXPECT_TRUE(engine.select_sequences(std::vector<int64_t>{2, 0, 1}).is_ok());
      decoding.steps(1);
      in_flight();  // a pass that is given up
      decoding.steps(2);
      in_flight();
      return std::pair(decoding.chosen(), decoding.outputs());  // closed with them in flight
    };
    EXPECT_EQ(life("verify"), life("off")) << is_shared;
  }
  EXPECT_TRUE(directory.is_empty());
}

TEST(Prefetch, AResetForgetsWhatIsInFlight) {
  const TestDirectory directory;
  Decoding decoding(three_layers(directory.path()), Prediction::kNear);
  decoding.steps(3);
  decoding.look_ahead(1);
  EXPECT_TRUE(decoding.engine().reset().is_ok());
  EXPECT_EQ(decoding.engine().batch(), 0);
  EXPECT_TRUE(decoding.engine().last_selection(1).empty());
}

TEST(Prefetch, AChoiceThatIsGivenIsNoPredictions) {
  const TestDirectory directory;
  Decoding decoding(three_layers(directory.path()), Prediction::kNear);
  decoding.steps(2);
  const std::vector<std::vector<int32_t>> given = {{3, 9}, {4}, {5, 11}};
  ASSERT_TRUE(decoding.engine().given().take_choice(1, given).is_ok());
  decoding.step();
  EXPECT_EQ(decoding.engine().last_selection(1), given);
}

TEST(Prefetch, WithoutAPageToSpareItIsOffByName) {
  const TestDirectory directory;
  EngineOptions options = three_layers(directory.path());
  options.pages_max = options.groups_max;
  Decoding decoding(options, Prediction::kRight);
  decoding.steps(4);
  EXPECT_EQ(decoding.counters().groups_prefetched, 0u);
  EXPECT_EQ(engine_facts(decoding.engine()).at("look_ahead"),
            "off: memory.pages_per_layer (6) leaves no page beside selection.top_k_groups");
  EXPECT_FALSE(engine_counters(decoding.engine()).contains("prefetch_hits"));
  options.resident_layers = 2;  // its pages are another layer's until it attends
  Decoding shared(options, Prediction::kRight);
  shared.steps(4);
  EXPECT_GT(shared.counters().groups_prefetched, 0u);
  EXPECT_EQ(engine_facts(shared.engine()).at("look_ahead"), "verify");
}

TEST(Prefetch, CountersAreByLayer) {
  const TestDirectory directory;
  Decoding decoding(three_layers(directory.path()), Prediction::kNear);
  decoding.steps(6);
  const auto counters = engine_counters(decoding.engine());
  for (const char* name : {"prefetch_hits", "prefetch_wasted", "prefetch_dropped"}) {
    double sum = 0;
    for (int layer = 0; layer < 3; ++layer) {
      sum += counters.at(name + ("_" + std::to_string(layer)));
    }
    EXPECT_EQ(counters.at(name), sum) << name;
  }
  EXPECT_EQ(counters.at("prefetch_hits_0"), 0) << "none is before it";
  EXPECT_GT(counters.at("prefetch_hits_1"), 0);
  EXPECT_EQ(counters.at("groups_prefetched"),
            counters.at("prefetch_hits") + counters.at("prefetch_wasted"));
  EXPECT_EQ(counters.at("predicts_1"), 1);
}

/// Steps until the layer's way changes, at most so many; `seconds`: of a step with a prediction,
/// and without.
int64_t steps_to_change(AdaptivePrefetch& adaptive, double with, double without, int64_t most) {
  const bool predicts = adaptive.predicts(0);
  for (int64_t step = 1; step <= most; ++step) {
    adaptive.observe(0, adaptive.predicts(0), adaptive.predicts(0) ? with : without);
    if (adaptive.predicts(0) != predicts) return step;
  }
  return 0;
}

class AdaptivePrefetchTest : public testing::Test {
 protected:
  static constexpr int64_t kTrial = AdaptivePrefetch::kTrialSteps;
  static constexpr int64_t kBetween = AdaptivePrefetch::kStepsBetweenTrials;

  AdaptivePrefetchTest() : directory_(), adaptive_(small_options(directory_.path())) {}

  const TestDirectory directory_;
  AdaptivePrefetch adaptive_;
};

TEST_F(AdaptivePrefetchTest, GoesOnWhereThePredictionPays) {
  EXPECT_EQ(steps_to_change(adaptive_, 0.001, 0.002, 500), AdaptivePrefetch::kStepsToFirstTrial);
  EXPECT_EQ(steps_to_change(adaptive_, 0.001, 0.002, 500), kTrial) << "the trial ends";
  EXPECT_TRUE(adaptive_.predicts(0));
  EXPECT_EQ(steps_to_change(adaptive_, 0.001, 0.002, 500), kBetween);
  EXPECT_TRUE(adaptive_.predicts(1)) << "each layer for itself";
}

TEST_F(AdaptivePrefetchTest, StopsWhereItCostsMoreAndTriesAgain) {
  steps_to_change(adaptive_, 0.002, 0.001, 500);
  EXPECT_EQ(steps_to_change(adaptive_, 0.002, 0.001, kTrial), 0) << "it stays without";
  EXPECT_FALSE(adaptive_.predicts(0));
  EXPECT_EQ(steps_to_change(adaptive_, 0.002, 0.001, 500), kBetween) << "a trial";
  EXPECT_EQ(steps_to_change(adaptive_, 0.002, 0.001, 500), kTrial) << "it still costs more";
  // The disk has become slow.
  EXPECT_EQ(steps_to_change(adaptive_, 0.003, 0.009, 500), kBetween);
  EXPECT_EQ(steps_to_change(adaptive_, 0.003, 0.009, 3 * kTrial), 0) << "it stays with it";
  EXPECT_TRUE(adaptive_.predicts(0));
}

TEST_F(AdaptivePrefetchTest, AnEqualWayIsNotTaken) {
  for (int i = 0; i < 5; ++i) {
    EXPECT_GT(steps_to_change(adaptive_, 0.00100, 0.00095, 500), 0);
    EXPECT_FALSE(adaptive_.predicts(0)) << "a trial";
    EXPECT_EQ(steps_to_change(adaptive_, 0.00100, 0.00095, 500), kTrial);
  }
}

TEST_F(AdaptivePrefetchTest, StopsAtOnceWhereItReadsInVain) {
  const auto step = [&](uint64_t hits, uint64_t wasted) {
    adaptive_.count(0, {.hits = hits, .wasted = wasted});
    adaptive_.observe(0, true, 0.001);
    return adaptive_.predicts(0);
  };
  EXPECT_TRUE(step(1, 9)) << "one step may be chance";
  EXPECT_FALSE(step(1, 9));
  EXPECT_EQ(steps_to_change(adaptive_, 0.001, 0.002, 500), kBetween) << "a trial";
  EXPECT_TRUE(step(6, 4)) << "what was before the trial does not count";
  EXPECT_TRUE(step(6, 4));
  while (adaptive_.hit_share(0) > AdaptivePrefetch::kHitShareLeast) step(0, 9);
  EXPECT_FALSE(adaptive_.predicts(0)) << "however well it began";
}

TEST_F(AdaptivePrefetchTest, WithoutAPredictorNothingIsDecided) {
  for (int step = 0; step < 1000; ++step) adaptive_.observe(0, false, 0.001);
  AdaptivePrefetch::Counts counts;
  adaptive_.count(0, {.hits = 3, .wasted = 1});
  adaptive_.count(0, {.hits = 0, .wasted = 4, .dropped = 2});
  counts = adaptive_.counts(0);
  EXPECT_EQ(counts.hits, 3u);
  EXPECT_EQ(counts.wasted, 5u);
  EXPECT_EQ(counts.dropped, 2u);
  EXPECT_NEAR(adaptive_.hit_share(0), 0.75 - 0.75 / 8, 1e-9);
  EXPECT_EQ(adaptive_.hit_share(1), -1);
}

}  // namespace
}  // namespace kvswap
