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
      ASSERT_TRUE(std::ranges::equal(a.table().place(), b.table().place()));
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
  for (const char* how : {"linked", "copied", "forked"}) {
    for (uint64_t seed = 0; seed < 2 && !HasFatalFailure(); ++seed) {
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

INSTANTIATE_TEST_SUITE_P(Lives, SavedClusters, testing::ValuesIn(kClusterLives),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvswap
