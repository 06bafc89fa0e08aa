// Sessions that choose clusters of similar keys: what is attended, and where tokens stand.

#include "cluster_lives.h"
#include "io/fault_injection.h"

namespace kvswap {
namespace {

using Clustered = ClusterLives;

TEST_P(Clustered, AttendsWhatItChoseAndWhatWaits) {
  ClusterRun run(options(), 1);
  run.append(2, 150);
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) run.step(2, 1);
  for (int i = 0; i < 20 && !HasFatalFailure(); ++i) run.step(2, run.run().draw(1, 4));
  run.append(2, 60);
  for (int i = 0; i < 10 && !HasFatalFailure(); ++i) run.step(2, 1);
  for (const int64_t layer : {0, 1}) run.check_records(layer);
  run.compare_contents();
  if (options().cluster_update == "adaptive") {
    EXPECT_GT(run.row(0, 0).clusters.counts().splits, 0);
  }
  EXPECT_GT(run.engine().context().counters.cluster_records_sealed, 100u);
}

TEST_P(Clustered, LivesAsTheReferenceDoes) {
  for (int64_t seed = 2; seed < 2 + lives(2, 6) && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    ClusterRun run(options(seed % 2 ? 4 : 8), seed);
    run.live(60);
  }
}

/// Crops of a few tokens at a time, down to the last: into groups, clusters and those that wait.
TEST_P(Clustered, IsCroppedAnywhere) {
  for (const int64_t most : {7, 40}) {
    ClusterRun run(options(), 5);
    run.append(2, 130);
    for (int i = 0; i < 15 && !HasFatalFailure(); ++i) run.step(2, run.run().draw(1, 4));
    while (run.engine().positions(0) > 1 && !HasFatalFailure()) {
      const int64_t positions = run.engine().positions(0);
      run.crop(std::max<int64_t>(1, positions - run.run().draw(1, most)));
      run.check_all();
      const int64_t next = run.run().draw(0, 9);
      if (next < 3 && !HasFatalFailure()) run.step(2, run.run().draw(1, 3));
      if (next == 3 && most > 20 && !HasFatalFailure()) run.append(2, 20);
    }
    run.append(2, 90);
    for (int i = 0; i < 6 && !HasFatalFailure(); ++i) run.step(2, 1);
    run.check_all();
  }
}

/// A text that is changed again and again: new clusters stand where those did that a crop emptied.
TEST_P(Clustered, GivesTheNumbersOfCroppedClustersAgain) {
  ClusterRun run(options(), 9);
  run.append(2, 160);
  std::set<int64_t> emptied;
  int64_t given_again = 0;
  const int cycles = is_long() ? 12 : 5;
  for (int cycle = 0; cycle < cycles && !HasFatalFailure(); ++cycle) {
    for (int i = 0; i < 12 && !HasFatalFailure(); ++i) run.step(2, run.run().draw(1, 4));
    for (const int64_t cluster : emptied) {
      const auto sizes = run.row(0, 0).clusters.table().size();
      given_again += cluster < std::ssize(sizes) && sizes[cluster] > 0 ? 1 : 0;
    }
    const auto before = run.row(0, 0).clusters.table().size();
    const std::vector<int32_t> sizes(before.begin(), before.end());
    run.crop(run.run().draw(40, 150));
    run.check_all();
    const auto after = run.row(0, 0).clusters.table().size();
    emptied.clear();
    for (int64_t c = 0; c < std::ssize(sizes); ++c) {
      const bool is_empty = c >= std::ssize(after) || after[c] == 0;
      if (sizes[c] > 0 && is_empty) emptied.insert(c);
    }
    if (!HasFatalFailure()) run.append(2, 160 - run.engine().positions(0));
    run.check_all();
  }
  EXPECT_GT(given_again, is_long() ? 60 : 20);
}

TEST_P(Clustered, AuditsTellWhatWasMissed) {
  EngineOptions options = this->options();
  options.audit_every = 1;
  options.audit_groups = 200;  // all that there are: no estimate
  ClusterRun run(options, 3);
  run.append(1, 150);
  for (int i = 0; i < 20 && !HasFatalFailure(); ++i) run.step(1, run.run().draw(1, 3));
  double most = 0;
  for (int64_t layer = 0; layer < options.layers && !HasFatalFailure(); ++layer) {
    const std::vector<double>& missed = run.missed(layer);
    const MissedMass& found = run.engine().audit().layers()[layer];
    ASSERT_EQ(found.looks, std::ssize(missed));
    const double sum = std::accumulate(missed.begin(), missed.end(), 0.0);
    EXPECT_NEAR(found.sum, sum, options.dtype == DType::kFloat32 ? 1e-4 : 0.01);
    most = std::max(most, sum);
  }
  EXPECT_EQ(most > 1, options.groups_max < 100);
}

INSTANTIATE_TEST_SUITE_P(Lives, Clustered, testing::ValuesIn(cluster_lives()),
                         [](const auto& info) { return std::string(info.param.name); });

/// What tokens of several rows wait for is read at once.
TEST(ClusteredReads, TravelTogether) {
  const TestDirectory directory;
  EngineOptions options = each_head(without_reuse(cluster_options(directory.path())));
  ReadFaults seen;
  options.wrap_reader = [&seen](std::unique_ptr<BlockReader> inner) {
    return std::make_unique<FaultyReader>(std::move(inner), &seen);
  };
  ClusterRun run(options, 8);
  run.append(3, 150);
  uint64_t submits = 0, records = 0;
  for (int i = 0; i < 60 && !testing::Test::HasFatalFailure(); ++i) {
    for (const int64_t layer : {0, 1}) {
      const Tokens drawn = run.run().draw_tokens(3, 1);
      run.run().memory().append(layer, 3, drawn);
      ASSERT_TRUE(run.run().give(layer, drawn, 3).is_ok());
      const std::vector<float> query = run.run().draw_query(3, 1);
      ASSERT_TRUE(run.engine().look_ahead(layer, run.run().view(query, 1), 0.125f).is_ok());
      const uint64_t submitted = seen.submits_seen;
      const uint64_t read = run.engine().context().counters.cluster_records_read;
      std::vector<std::byte> output;
      ASSERT_TRUE(run.run().attend(layer, query, 1, output).is_ok());
      submits += seen.submits_seen - submitted;
      records += run.engine().context().counters.cluster_records_read - read;
      run.check_rows(layer);
    }
  }
  for (const int64_t layer : {0, 1}) run.check_records(layer);
  EXPECT_GT(submits, 20u);
  EXPECT_GT(records, 2 * submits);
}

TEST(ClusteredPools, OneReadFetchesAClusterHoweverItHasGrown) {
  for (const int64_t slack : {0, 2, 5}) {
    SCOPED_TRACE(slack);
    const TestDirectory directory;
    EngineOptions options = in_pools(without_reuse(cluster_options(directory.path())));
    options.pool_slack_pages = slack;
    options.merge_gap_bytes = 0;
    options.cluster_tokens_max = 20;
    ClusterRun run(options, 6);
    run.append(2, 200);
    for (const int64_t layer : {0, 1}) run.check_neighbours(layer);
    for (int i = 0; i < 120 && !testing::Test::HasFatalFailure(); ++i) {
      for (const int64_t layer : {0, 1}) {
        const Tokens drawn = run.run().draw_tokens(2, 1);
        run.run().memory().append(layer, 2, drawn);
        ASSERT_TRUE(run.run().give(layer, drawn, 2).is_ok());
        const std::vector<float> query = run.run().draw_query(2, 1);
        const auto before = run.engine().context().fetcher->reader().counters().reads;
        ASSERT_TRUE(run.engine().look_ahead(layer, run.run().view(query, 1), 0.125f).is_ok());
        const auto clusters = run.clusters_of(run.engine().last_selection(layer));
        const auto reads = run.engine().context().fetcher->reader().counters().reads - before;
        EXPECT_LE(reads, static_cast<uint64_t>(clusters));
        std::vector<std::byte> output;
        ASSERT_TRUE(run.run().attend(layer, query, 1, output).is_ok());
        run.check_rows(layer);
        run.check_neighbours(layer);
      }
    }
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    EXPECT_GT(run.engine().context().counters.cluster_splits, 10u);
  }
}

TEST(ClusteredPools, BeamsThatGoOnDifferentlyHaveNeighboursEach) {
  const TestDirectory directory;
  ClusterRun run(in_pools(cluster_options(directory.path())), 7);
  run.append(2, 150);
  for (int i = 0; i < 60 && !testing::Test::HasFatalFailure(); ++i) {
    if (i % 7 == 3) run.run().select({i % 2, 1, 0});
    run.step(run.engine().batch(), 1);
    for (const int64_t layer : {0, 1}) run.check_neighbours(layer);
  }
  for (const int64_t layer : {0, 1}) run.check_records(layer);
}

TEST(ClusteredContext, EndsWherePlacesNoLongerFit32Bits) {
  const TestDirectory directory;
  EngineOptions options = cluster_options(directory.path());
  options.cluster_tokens = 4;
  options.cluster_tokens_max = 4096;
  const int64_t most = ClusterStore::tokens_most(options.method());
  const auto places = [&](int64_t tokens) {
    return options.method().clusters.clusters_max(ClusterStore::room_for(tokens)) *
           pages_a_cluster(options.method()) * options.group_tokens;
  };
  EXPECT_LT(places(most), int64_t{1} << 31);
  EXPECT_GE(places(most + 1), int64_t{1} << 31);

  EXPECT_LT(most, 1'700'000);
  options.max_context = most + 1;
  const Status refused = Engine::create(options, nullptr).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalid);
  EXPECT_NE(
      refused.message().find("clusters.max_tokens (4096) so far above clusters.target_tokens (4)"),
      std::string::npos)
      << refused.message();

  // What a session that has promised no context asks before each append.
  EXPECT_TRUE(check_context(options, most).is_ok());
  EXPECT_FALSE(check_context(options, most + 1).is_ok());
}

}  // namespace
}  // namespace kvswap
