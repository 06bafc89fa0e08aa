// Engines of clusters that are saved, opened and forked go on as the one that never was.

#include "cluster_lives.h"
#include "methods/clusters/cluster_numbers.h"
#include "saved_engine.h"

namespace kvswap {
namespace {

/// Saves a run's engine, or forks it, and has the run go on with what comes of it. The first.
std::unique_ptr<Engine> go_elsewhere(ClusterRun& run, const EngineOptions& options,
                                     const std::string& how) {
  if (how == "forked") return run.run().go_on_with(fork_of(run.engine()));
  SavedInMemory saved(options.directory, how == "linked");
  const Status status = run.engine().saver().save(saved);
  EXPECT_TRUE(status.is_ok()) << status.message();
  auto opened = saved.open(options);
  EXPECT_TRUE(opened.is_ok()) << opened.status().message();
  return run.run().go_on_with(std::move(opened.value()));
}

/// Who is in which cluster, where each token stands, and what was selected.
void expect_same(ClusterRun& one, ClusterRun& other, int64_t layers) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    ASSERT_EQ(one.engine().last_selection(layer), other.engine().last_selection(layer)) << layer;
    for (int64_t part = 0; part < one.parts(); ++part) {
      const auto& [a, a_pages] = one.row(layer, part);
      const auto& [b, b_pages] = other.row(layer, part);
      ASSERT_EQ(a.left(), b.left());
      ASSERT_EQ(a.threshold(), b.threshold());
      // Of a file without sealed tokens the tables are made when some come.
      ASSERT_TRUE(
          std::ranges::equal(a.table().place().first(a.left()), b.table().place().first(b.left())));
      ASSERT_TRUE(std::ranges::equal(a.table().variance(), b.table().variance()));
      ASSERT_TRUE(std::ranges::equal(a.table().comparable(), b.table().comparable()));
      ASSERT_TRUE(std::ranges::equal(a_pages.waiting(), b_pages.waiting()));
      for (int64_t token = 0; token < a.left(); ++token) {
        ASSERT_EQ(a_pages.place(token), b_pages.place(token)) << token;
      }
    }
  }
}

/// What the reuse buffers hold, and since when.
void expect_same_pages(ClusterRun& one, ClusterRun& other, int64_t layers) {
  for (int64_t part = 0; part < one.parts(); ++part) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      const PageMap& a = one.engine().sequences().pages(part).map(layer);
      const PageMap& b = other.engine().sequences().pages(part).map(layer);
      ASSERT_EQ(a.step(), b.step());
      const auto held = a.held(), held_there = b.held();
      ASSERT_EQ(held.size(), held_there.size()) << layer;
      for (size_t i = 0; i < held.size(); ++i) {
        ASSERT_EQ(held[i].page, held_there[i].page);
        ASSERT_EQ(held[i].state.loaded_step, held_there[i].state.loaded_step);
        ASSERT_EQ(held[i].state.used_step, held_there[i].state.used_step);
        ASSERT_EQ(held[i].state.score, held_there[i].state.score);
        ASSERT_EQ(held[i].cluster.pages, held_there[i].cluster.pages);
        ASSERT_EQ(held[i].cluster.updated_step, held_there[i].cluster.updated_step);
      }
    }
  }
}

class SavedClusters : public ClusterLives {};

TEST_P(SavedClusters, GoOnAsTheOneThatWasNeverSaved) {
  // Other settings have other seeds, even or odd.
  auto begin = static_cast<int64_t>(std::string(GetParam().name).size());
  for (const char* how : {"linked", "copied", "forked"}) {
    ++begin;
    for (int64_t seed = begin; seed < begin + lives(1, 2) && !HasFatalFailure(); ++seed) {
      SCOPED_TRACE(testing::Message() << how << " " << seed);
      const EngineOptions options = this->options(seed % 2 ? 4 : 8);
      ClusterRun never(options, seed), run(options, seed);
      never.live(12);
      run.live(12);
      while (run.engine().batch() == 0 || run.engine().positions(0) < 60) {
        const int64_t batch = std::max<int64_t>(1, run.engine().batch());
        never.append(batch, 40);
        run.append(batch, 40);
      }
      for (int i = 0; i < 8; ++i) never.step(never.engine().batch(), 1);
      for (int i = 0; i < 8; ++i) run.step(run.engine().batch(), 1);
      auto first = go_elsewhere(run, options, how);
      ASSERT_FALSE(HasFailure());
      run.run().compare_state();
      // A file that ends takes no page beside those that stay: with pools more is written anew.
      const bool is_exact = options.layout != "pools";
      if (is_exact) expect_same_pages(never, run, options.layers);
      for (int64_t layer = 0; layer < options.layers; ++layer) run.check_rows(layer);
      if (seed % 2) first.reset();
      for (int i = 0; i < 16 && !HasFatalFailure(); ++i) {
        never.step(never.engine().batch(), 1 + i % 3);
        run.step(run.engine().batch(), 1 + i % 3);
        if (is_exact) {
          expect_same(never, run, options.layers);
          expect_same_pages(never, run, options.layers);
        }
      }
      run.check_all();
      run.live(8);
      // Again, of what stands on files below.
      if (run.engine().batch() == 0 || run.engine().positions(0) == 0) continue;
      first = go_elsewhere(run, options, how);
      run.check_all();
      run.live(5);
    }
  }
}

/// Cropped anywhere, with numbers that are given again before and after; of an older file, which
/// does not say when the threshold was settled, too.
TEST_P(SavedClusters, GoOnAfterACropAsTheOneThatWasNeverSaved) {
  int count = 0;
  for (int64_t cut = 1; cut < 150 && !HasFatalFailure(); cut += 21 * stride(3)) {
    const char* how = std::vector{"linked", "copied", "forked"}[count++ % 3];
    SCOPED_TRACE(testing::Message() << how << " " << cut);
    const EngineOptions options = this->options();
    ClusterRun never(options, cut), run(options, cut);
    for (ClusterRun* each : {&never, &run}) {
      each->append(2, 150);
      for (int i = 0; i < 6; ++i) each->step(2, 2);
      each->crop(80);
      each->append(2, 70);
      for (int i = 0; i < 4; ++i) each->step(2, 1);
      each->crop(cut);
    }
    const auto first = go_elsewhere(run, options, how);
    ASSERT_FALSE(HasFailure());
    for (int64_t layer = 0; layer < options.layers; ++layer) run.check_rows(layer);
    const bool is_exact = options.layout != "pools";
    for (int i = 0; i < 8 && !HasFatalFailure(); ++i) {
      for (ClusterRun* each : {&never, &run}) {
        i % 4 == 2 ? each->append(2, 50) : each->step(2, 1 + i % 3);
      }
      if (is_exact) expect_same(never, run, options.layers);
    }
    run.check_all();
  }
}

TEST(OlderSavedClusters, AreOpenedWithoutWhenTheThresholdWasSettled) {
  const TestDirectory directory;
  const EngineOptions options = cluster_options(directory.path());
  ClusterRun run(options, 3);
  run.append(2, 700);
  run.step(2, 1);
  ASSERT_GT(run.row(0, 0).clusters.threshold().settled_at, 500);
  const std::optional<double> settled = run.row(0, 0).clusters.threshold().variance;
  SavedInMemory saved(options.directory, true);
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    ASSERT_EQ(saved.tensors().erase("layers." + std::to_string(layer) + ".cluster_settled"), 1u);
  }
  auto opened = saved.open(options);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  const auto first = run.run().go_on_with(std::move(opened.value()));
  EXPECT_EQ(run.row(0, 0).clusters.threshold().settled_at, 0);
  EXPECT_EQ(run.row(0, 0).clusters.threshold().variance, settled);
  run.step(2, 3);
  run.crop(600);
  run.check_all();
  EXPECT_EQ(run.row(0, 0).clusters.threshold().variance, settled) << "enough is left";
  run.crop(300);
  run.check_all();
  EXPECT_EQ(run.row(0, 0).clusters.threshold().variance, std::nullopt);
  run.append(2, 400);
  run.step(2, 2);
  run.check_all();
  EXPECT_NE(run.row(0, 0).clusters.threshold().variance, std::nullopt);
}

/// Two tokens a page, two pages a cluster, of width 1.
ClusterRow row_of(const ClusterOptions& options, int64_t room) {
  ClusterRow row = {AdaptiveClusters(1, room, options), ClusterPages(2, 2)};
  row.pages.grow(room, row.clusters.table().clusters_max());
  return row;
}

std::string must_of(const ClusterNumbers& numbers, const ClusterOptions& options) {
  const auto fault = fault_of(numbers, {.tokens = std::ssize(numbers.clusters),
                                        .room = 16,
                                        .width = 1,
                                        .page_tokens = 2,
                                        .pages_a_cluster = 2,
                                        .options = options});
  return fault ? fault->must : "";
}

TEST(ClusterNumbers, MayBeGivenAgainButTokensStandInNoCircle) {
  const ClusterOptions options = {.cluster_tokens = 2, .cluster_tokens_max = 4};
  // Token 0 of cluster 0 stands in a page of cluster 2, which is older: it was split.
  ClusterNumbers numbers = {.clusters = {0, 2, 1, 0},
                            .places = {8, 9, 4, 0},
                            .centroids = {0, 1, 2},
                            .variances = {0, 0, 0},
                            .comparable = {2, 1, 1},
                            .threshold = std::nullopt,
                            .pending = {}};
  EXPECT_EQ(must_of(numbers, options), "");
  numbers.clusters = {0, 2, 1, 2};
  numbers.comparable = {1, 1, 2};
  EXPECT_NE(must_of(numbers, options).find("in a circle"), std::string::npos);
  numbers.clusters = {0, 2, 1, 0};
  numbers.comparable = {2, 1, 1};
  numbers.places = {12, 9, 4, 0};
  EXPECT_NE(must_of(numbers, options).find("a cluster that is there"), std::string::npos);
}

/// A crop of before could leave tokens that wait for a cluster which has none: its number is not
/// another's as long as they do.
TEST(ClusterNumbers, ThatTokensWaitForAreNotGivenAgain) {
  const ClusterOptions options = {
      .cluster_tokens = 2, .cluster_tokens_max = 4, .pending_tokens = 4};
  const ClusterNumbers numbers = {.clusters = {0, 0, kIsPending},
                                  .places = {0, 1, ClusterPages::kFirstWaiting},
                                  .centroids = {1},
                                  .variances = {0},
                                  .comparable = {2},
                                  .threshold = std::nullopt,
                                  .pending = {{2, 2}}};
  ASSERT_EQ(must_of(numbers, options), "");
  ClusterRow row = row_of(options, 16);
  numbers.restore(row);
  const ClusterTable& table = row.clusters.table();
  EXPECT_EQ(table.count(), 3);
  EXPECT_EQ(table.numbers().used(), 2) << "0, and 2, which is waited for";
  const std::vector<float> keys = {1, 1, 50, 90, 90, 90, 90};
  const KeyRows rows = {.data = keys.data(), .width = 1, .stride = 1};
  row.clusters.enter_prompt(rows, 7, {});
  EXPECT_EQ(table.place()[3], 1) << "the lowest that is free";
  row.clusters.take_in(rows, 2);
  EXPECT_EQ(table.place()[2], 2);
  EXPECT_EQ(table.size()[2], 1);
  row.pages.end_wait(2);
  EXPECT_TRUE(row.truncate(2).empty());
  EXPECT_EQ(table.count(), 1);
  EXPECT_EQ(table.numbers().used(), 1);
}

INSTANTIATE_TEST_SUITE_P(Lives, SavedClusters, testing::ValuesIn(cluster_lives()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvswap
