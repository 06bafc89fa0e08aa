// Sessions that choose clusters of similar keys: what is attended, where tokens stand, what a disk
// that fails leaves.

#include <map>
#include <set>

#include "engine_run.h"
#include "io/fault_injection.h"
#include "methods/cluster_selector.h"

namespace kvswap {
namespace {

EngineOptions cluster_options(const std::string& directory, int64_t group_tokens = 4) {
  EngineOptions options = small_options(directory, group_tokens);
  options.ranks = {};
  options.rows = "centroid";
  options.grouping = "clusters";
  options.cluster_tokens = 4;
  options.cluster_tokens_max = 10;
  options.pending_tokens = 5;
  options.groups_max = 6;
  options.pages_max = 24;
  return options;
}

/// An engine of clusters, and what it was given, which is told what is attended.
class ClusterRun {
 public:
  ClusterRun(const EngineOptions& options, uint64_t seed)
      : options_(options), run_(options, seed) {}

  EngineRun& run() { return run_; }
  Engine& engine() { return run_.engine(); }
  const ClusterRow& row(int64_t layer, int64_t part) {
    return engine().parts().clusters->of(layer, part);
  }
  int64_t parts() { return engine().sequences().size(); }
  int64_t heads_apart() { return engine().parts().options.heads_apart; }

  void append(int64_t batch, int64_t tokens, const std::vector<uint8_t>& valid = {}) {
    if (!valid.empty()) {
      const auto* flags = reinterpret_cast<const bool*>(valid.data());
      run_.memory().declare(batch, tokens, flags);
      ASSERT_TRUE(engine().declare(batch, tokens, flags).is_ok());
    }
    for (int64_t layer = 0; layer < options_.layers; ++layer) run_.append(layer, batch, tokens);
    run_.compare_state();
  }

  /// A forward pass of so many tokens, some layers of which look ahead; what a disk refuses is
  /// asked again once it is mended.
  void step(int64_t batch, int64_t tokens, ReadFaults* faults = nullptr) {
    ASSERT_TRUE(run_.begin(tokens).is_ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const std::vector<float> ahead = run_.draw_query(batch, tokens);
      const bool looks = run_.draw(0, 1) == 0;
      if (looks) {
        repeat(faults,
               [&] { return engine().look_ahead(layer, run_.view(ahead, tokens), 0.125f); });
      }
      const Tokens drawn = run_.draw_tokens(batch, tokens);
      run_.memory().append(layer, batch, drawn);
      repeat(faults, [&] { return engine().append(layer, run_.view(drawn, batch)); });
      const std::vector<float> query = run_.draw_query(batch, tokens);
      std::vector<std::byte> output;
      const bool stands = looks && engine().sequences().layer(layer).sealed_groups > 0;
      const auto seen = seen_tokens(
          layer, stands ? engine().last_selection(layer) : choice(layer, query, tokens));
      const int refused = refused_;
      repeat(faults, [&] { return run_.attend(layer, query, tokens, output); });
      if (testing::Test::HasFatalFailure()) return;
      const auto expected = run_.memory().attend_over(
          layer, query, tokens, 0.125,
          [&](int64_t, int64_t part, int64_t token) { return seen[part].contains(token); });
      // One that was refused after it had attended enters its tokens first, and chooses anew.
      if (refused == refused_) run_.expect_close(output, expected);
      check_rows(layer);
    }
    run_.compare_state();
  }

  /// Each token of a row stands where exactly one thing has it, and its cluster knows it.
  void check_rows(int64_t layer) {
    const int64_t group_tokens = options_.group_tokens;
    const int64_t sealed = engine().sequences().layer(layer).sealed_groups * group_tokens;
    for (int64_t part = 0; part < parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      const int64_t b = part / heads_apart();
      ASSERT_EQ(clusters.left(), sealed);
      ASSERT_LE(std::ssize(pages.waiting()), options_.pending_tokens);
      std::vector<int64_t> sizes(clusters.table().count());
      std::map<int64_t, uint64_t> masks;
      int64_t waiting = 0;
      for (int64_t token = 0; token < sealed; ++token) {
        const bool is_outside =
            !run_.memory().validity()[b][token] || run_.memory().is_sink(b, token / group_tokens);
        const int32_t cluster = clusters.table().place()[token];
        ASSERT_EQ(is_outside, cluster == kInSinks) << token;
        if (is_outside) {
          ASSERT_EQ(pages.place(token), -1);
          continue;
        }
        if (cluster >= 0) ++sizes[cluster];
        if (pages.place(token) < 0) {
          const int64_t at = pages.waiting_at(token);
          ASSERT_GE(at, 0) << token << " stands nowhere";
          ASSERT_EQ(pages.waiting()[at], token);
          ++waiting;
        } else {
          masks[pages.place(token) / group_tokens] |= uint64_t{1}
                                                      << pages.place(token) % group_tokens;
        }
      }
      ASSERT_EQ(waiting, std::ssize(pages.waiting()));
      for (int64_t cluster = 0; cluster < clusters.table().count(); ++cluster) {
        ASSERT_EQ(clusters.table().size()[cluster], sizes[cluster]);
        ASSERT_LE(sizes[cluster], options_.cluster_tokens_max);
        pages.each_page(cluster, [&](int64_t slot) {
          ASSERT_EQ(pages.mask(slot), masks[slot]);
          ASSERT_TRUE(engine().parts().store->tables().has_page(layer, part, page_id(slot)));
          masks.erase(slot);
        });
      }
      ASSERT_TRUE(masks.empty());
    }
  }

  /// Every record of every cluster holds what its tokens are, byte for byte.
  void check_records(int64_t layer) {
    EngineParts& parts = const_cast<EngineParts&>(engine().parts());
    const RecordShape shape = parts.options.record_shape();
    auto memory = share_aligned_bytes(parts.record_bytes(), AtEnd::kLeft);
    ASSERT_TRUE(memory.is_ok());
    for (int64_t part = 0; part < this->parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      for (int64_t token = 0; token < clusters.left(); ++token) {
        const int32_t place = pages.place(token);
        if (place < 0) continue;
        Fetch fetch;
        fetch.layer = layer;
        fetch.loads.push_back(
            {part, page_id(place / shape.group_tokens), -1, memory.value().get(), nullptr});
        ASSERT_TRUE(parts.fetcher->submit(fetch).is_ok());
        ASSERT_TRUE(parts.fetcher->finish(fetch).is_ok());
        const auto& kept = run_.memory().layer(layer).sequences[part / heads_apart()];
        const int64_t row_bytes = shape.head_dim * shape.element_bytes;
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
          const int64_t of_model = heads_apart() > 1 ? part % heads_apart() : head;
          const int64_t at =
              (token * options_.kv_heads + of_model) * options_.head_dim * shape.element_bytes;
          const std::byte* key =
              memory.value().get() +
              (2 * head * shape.group_tokens + place % shape.group_tokens) * row_bytes;
          ASSERT_EQ(std::memcmp(key, bytes_of(kept.keys, 0) + at, row_bytes), 0);
          ASSERT_EQ(std::memcmp(key + shape.group_tokens * row_bytes, bytes_of(kept.values, 1) + at,
                                row_bytes),
                    0);
        }
      }
    }
  }

  int refused() const { return refused_; }

 private:
  const std::byte* bytes_of(const std::vector<float>& values, int slot) {
    return static_cast<const std::byte*>(run_.raw(values, slot));
  }

  void repeat(ReadFaults* faults, const std::function<Status()>& call) {
    Status called = call();
    if (!called.is_ok() && faults != nullptr) {
      ++refused_;
      ASSERT_EQ(called.code(), StatusCode::kStorage) << called.message();
      *faults = {};
      called = call();
    }
    ASSERT_TRUE(called.is_ok()) << called.message();
  }

  /// What the next attend() attends over, of all parts' tokens.
  std::vector<std::set<int64_t>> seen_tokens(int64_t layer,
                                             const std::vector<std::vector<int32_t>>& chosen) {
    const int64_t group_tokens = options_.group_tokens;
    const Batch& batch = engine().sequences();
    std::vector<std::set<int64_t>> seen(parts());
    for (int64_t part = 0; part < parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      const std::set<int64_t> ids(chosen[part].begin(), chosen[part].end());
      for (int64_t token = 0; token < engine().columns(layer); ++token) {
        const int64_t group = token / group_tokens;
        const bool has_left = token < clusters.left();
        const int32_t place = has_left ? pages.place(token) : -1;
        const bool is_chosen = place >= 0 && ids.contains(page_id(place / group_tokens));
        const bool waits = has_left && pages.waiting_at(token) >= 0;
        if (group >= batch.layer(layer).sealed_groups ||
            run_.memory().is_sink(part / heads_apart(), group) ||
            (batch.fits(layer, part) ? ids.contains(group) : is_chosen || waits)) {
          seen[part].insert(token);
        }
      }
    }
    return seen;
  }

  /// As the engine asks it, of an engine that has not looked ahead.
  std::vector<std::vector<int32_t>> choice(int64_t layer, const std::vector<float>& query,
                                           int64_t queries) {
    const Batch& batch = engine().sequences();
    std::vector<std::vector<int32_t>> chosen(parts());
    if (!batch.all_fit(layer)) {
      const std::vector<Candidates> candidates(parts());
      engine().parts().selector->choose(
          {.layer = layer,
           .query = run_.view(query, queries).of_parts(heads_apart()),
           .groups = batch.layer(layer).sealed_groups,
           .groups_per_query = std::min(options_.groups_max, options_.pages_max / queries),
           .candidates = candidates,
           .chosen = &chosen,
           .scale = 0.125f});
    }
    for (int64_t part = 0; part < parts(); ++part) {
      if (batch.fits(layer, part)) {
        batch.choosable(layer, part, batch.layer(layer).sealed_groups, chosen[part]);
      }
    }
    return chosen;
  }

  EngineOptions options_;
  EngineRun run_;
  int refused_ = 0;
};

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
      const int64_t columns = run.engine().batch() == 0 ? 0 : run.engine().columns(0);
      if (action <= 2) {
        const int64_t tokens = run.run().draw(5, 90);
        const bool is_padded = run.run().draw(0, 1) == 0;
        run.append(batch, tokens,
                   is_padded ? run.run().left_padding(batch, tokens) : std::vector<uint8_t>{});
      } else if (action <= 14) {
        run.step(batch, run.run().draw(1, 4));
      } else if (action <= 16) {
        run.run().crop(run.run().draw(columns / 2, columns));
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
                    Life{"many_splits", many_splits}),
    [](const auto& info) { return std::string(info.param.name); });

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
    for (int i = 0; i < 24 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1, &faults);
    faults = {};
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    refused += run.refused();
  }
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace kvswap
