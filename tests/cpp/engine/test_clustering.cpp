// Sessions that choose clusters of similar keys: what is attended, where tokens stand, what a disk
// that fails leaves.

#include "cluster_run.h"
#include "io/fault_injection.h"
#include "io/forwarding_file.h"

namespace kvswap {
namespace {

struct Life {
  const char* name;
  EngineOptions (*adapt)(EngineOptions);
};

class Clustered : public testing::TestWithParam<Life> {
 protected:
  EngineOptions options(int64_t group_tokens = 4) {
    return GetParam().adapt(cluster_options(directory_.path(), group_tokens));
  }
  const TestDirectory directory_;
};

TEST_P(Clustered, AttendsWhatItChoseAndWhatWaits) {
  ClusterRun run(options(), 1);
  run.append(2, 150);
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) run.step(2, 1);
  for (int i = 0; i < 20 && !HasFatalFailure(); ++i) run.step(2, run.run().draw(1, 4));
  run.append(2, 60);
  for (int i = 0; i < 10 && !HasFatalFailure(); ++i) run.step(2, 1);
  for (const int64_t layer : {0, 1}) run.check_records(layer);
  run.run().compare_contents();
  const ClusterCounts& counts = run.row(0, 0).clusters.counts();
  EXPECT_GT(counts.splits, 0);
  EXPECT_GT(run.engine().parts().counters.cluster_records_sealed, 100u);
}

TEST_P(Clustered, LivesAsTheReferenceDoes) {
  for (uint64_t seed = 2; seed < 8 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    ClusterRun run(options(seed % 2 ? 4 : 8), seed);
    int64_t batch = run.run().draw(1, 3);
    for (int i = 0; i < 60 && !HasFatalFailure(); ++i) {
      const int64_t action = run.engine().batch() == 0 ? 0 : run.run().draw(0, 19);
      const int64_t positions = run.engine().batch() == 0 ? 0 : run.engine().positions(0);
      if (action <= 2) {
        const int64_t tokens = run.run().draw(5, 90);
        const bool is_padded = run.run().draw(0, 1) == 0;
        run.append(batch, tokens,
                   is_padded ? run.run().left_padding(batch, tokens) : std::vector<uint8_t>{});
      } else if (action <= 14) {
        run.step(batch, run.run().draw(1, 4));
      } else if (action <= 16) {
        run.run().crop(run.run().draw(positions / 2, positions));
      } else if (action <= 18) {
        std::vector<int64_t> indices(run.run().draw(1, 3));
        for (int64_t& index : indices) index = run.run().draw(0, batch - 1);
        run.run().select(indices);
        batch = static_cast<int64_t>(indices.size());
      } else if (run.run().draw(0, 3) == 0) {
        run.run().reset();
        batch = run.run().draw(1, 3);
      }
    }
    if (HasFatalFailure() || run.engine().batch() == 0) continue;
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    run.run().compare_contents();
  }
}

EngineOptions as_it_is(EngineOptions options) { return options; }
EngineOptions each_head(EngineOptions options) {
  options.heads = "each";
  options.head_dim *= 2;
  return options;
}
EngineOptions by_mass(EngineOptions options) {
  options.cluster_score = "mass";
  return options;
}
EngineOptions by_best_head(EngineOptions options) {
  options.cluster_score = "max";
  return options;
}
EngineOptions in_halves(EngineOptions options) {
  options.dtype = DType::kBFloat16;
  options.head_dim *= 2;
  options.cluster_score = "max_mass";
  return options;
}
EngineOptions by_what_was_paid(EngineOptions options) {
  options.replacement = "score";
  return options;
}
EngineOptions nothing_waits(EngineOptions options) {
  options.pending_tokens = 0;
  return options;
}
EngineOptions without_reuse(EngineOptions options) {
  options.replacement = "none";
  options.pages_max = 8;
  return options;
}
EngineOptions sharing_pages(EngineOptions options) {
  options.layers = 3;
  options.resident_layers = 2;
  return options;
}
EngineOptions in_pools(EngineOptions options) {
  options.layout = "pools";
  return options;
}
EngineOptions in_narrow_pools(EngineOptions options) {
  options.layout = "pools";
  options.pool_slack_pages = 0;
  options.cluster_tokens_max = 24;
  options.split_factor = 0.5;
  options.merge_gap_bytes = 0;
  return options;
}
EngineOptions many_splits(EngineOptions options) {
  options.replacement = "clusters";
  options.split_factor = 0.2;
  return options;
}

INSTANTIATE_TEST_SUITE_P(
    Lives, Clustered,
    testing::Values(Life{"usual", as_it_is}, Life{"each_head", each_head}, Life{"mass", by_mass},
                    Life{"max", by_best_head}, Life{"bfloat16", in_halves},
                    Life{"nothing_waits", nothing_waits}, Life{"no_reuse", without_reuse},
                    Life{"shared_pages", sharing_pages}, Life{"score", by_what_was_paid},
                    Life{"many_splits", many_splits}, Life{"pools", in_pools},
                    Life{"narrow_pools", in_narrow_pools}),
    [](const auto& info) { return std::string(info.param.name); });

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
        const auto before = run.engine().parts().fetcher->reader().counters().reads;
        ASSERT_TRUE(run.engine().look_ahead(layer, run.run().view(query, 1), 0.125f).is_ok());
        const auto clusters = run.clusters_of(run.engine().last_selection(layer));
        const auto reads = run.engine().parts().fetcher->reader().counters().reads - before;
        EXPECT_LE(reads, static_cast<uint64_t>(clusters));
        std::vector<std::byte> output;
        ASSERT_TRUE(run.run().attend(layer, query, 1, output).is_ok());
        run.check_rows(layer);
        run.check_neighbours(layer);
      }
    }
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    EXPECT_GT(run.engine().parts().counters.cluster_splits, 10u);
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

TEST(ClusteredFaults, WhatADiskRefusesIsDoneLater) {
  int refused = 0;
  for (uint64_t nth = 1; nth <= 60 && !testing::Test::HasFatalFailure(); ++nth) {
    SCOPED_TRACE(nth);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = cluster_options(directory.path());
    options.merge_gap_bytes = 0;
    options.wrap_reader = [&faults](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    ClusterRun run(options, 5);
    run.append(2, 150);
    faults = {};
    (nth % 3 == 0 ? faults.fail_submit : faults.fail_read) = nth;
    for (int i = 0; i < 24 && !testing::Test::HasFatalFailure(); ++i) {
      run.step(2, 1, [&] { faults = {}; });
    }
    faults = {};
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    refused += run.refused();
  }
  EXPECT_GT(refused, 50);
}

/// Bytes that nobody will read any more become others at once.
class ScribblingFile final : public ForwardingFile {
 public:
  ScribblingFile(std::unique_ptr<DataFile> inner, int64_t* scribbled)
      : ForwardingFile(std::move(inner)), scribbled_(scribbled) {}

  void discard(int64_t offset_bytes, int64_t length_bytes) override {
    auto memory = share_aligned_bytes(length_bytes, AtEnd::kLeft);
    ASSERT_TRUE(memory.is_ok());
    std::memset(memory.value().get(), 0x5a, length_bytes);
    ASSERT_TRUE(
        write(offset_bytes, {memory.value().get(), static_cast<size_t>(length_bytes)}).is_ok());
    ++*scribbled_;
  }

 private:
  int64_t* scribbled_;
};

TEST_P(Clustered, ReadsNoPlaceThatWasLetGo) {
  int64_t scribbled = 0;
  EngineOptions options = this->options();
  options.wrap_file = [&scribbled](std::unique_ptr<DataFile> inner) {
    return std::make_unique<ScribblingFile>(std::move(inner), &scribbled);
  };
  ClusterRun run(options, 9);
  run.append(2, 150);
  for (int i = 0; i < 60 && !HasFatalFailure(); ++i) {
    if (i % 20 == 15) run.run().crop(run.engine().positions(0) - 9);
    if (i % 20 == 18) run.run().select({1, 0});
    run.step(2, 1);
  }
  for (const int64_t layer : {0, 1}) run.check_records(layer);
  run.run().compare_contents();
  EXPECT_GT(scribbled, 20);
}

TEST(ClusteredFaults, AWriteThatFailsLeavesEachTokenAtOnePlace) {
  set_log([](const std::string&) {});
  int refused = 0;
  for (const char* layout : {"sequence", "pools"}) {
    for (uint64_t nth = 1; nth <= 40 && !testing::Test::HasFatalFailure(); ++nth) {
      SCOPED_TRACE(layout + std::to_string(nth));
      const TestDirectory directory;
      WriteFaults faults;
      EngineOptions options = cluster_options(directory.path());
      options.layout = layout;
      options.kv_memory_bytes = 16 << 20;  // small write buffers
      options.file_extend_bytes = 1;       // every run of records grows the file
      options.wrap_file = [&faults](std::unique_ptr<DataFile> inner) {
        return std::make_unique<FaultyDataFile>(std::move(inner), &faults);
      };
      ClusterRun run(options, 5);
      run.append(2, 90);
      ASSERT_TRUE(run.engine().parts().store->writes().flush().is_ok());
      const auto mend = [&] { faults.fail_write = faults.fail_reserve = 0; };
      faults.lasts = true;
      if (nth % 4 == 0) {
        faults.fail_reserve = faults.reserves_seen + nth / 4;
      } else {
        faults.fail_write = faults.writes_seen + nth;
      }
      run.append(2, 70, {}, mend);
      for (int i = 0; i < 16 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1, mend);
      mend();
      for (const int64_t layer : {0, 1}) run.check_records(layer);
      run.run().compare_contents();
      refused += run.refused();
    }
  }
  set_log(nullptr);
  EXPECT_GT(refused, 40);
}

TEST(ClusteredFaults, WrongBytesAreReadAgain) {
  uint64_t reread = 0;
  for (uint64_t nth = 1; nth <= 30 && !testing::Test::HasFatalFailure(); ++nth) {
    SCOPED_TRACE(nth);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = cluster_options(directory.path());
    options.wrap_reader = [&faults](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    ClusterRun run(options, 5);
    run.append(2, 150);
    faults = {};
    (nth % 2 == 0 ? faults.flip_read : faults.misdirect_read) = nth;
    faults.misdirect_bytes = run.engine().parts().record_bytes();
    for (int i = 0; i < 12 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1);
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    reread += run.engine().parts().fetcher->counters().reread_records;
  }
  EXPECT_GE(reread, 25u);
}

}  // namespace
}  // namespace kvswap
