#pragma once

#include <optional>

#include "device/host_device.h"
#include "engine/report/engine_report.h"
#include "engine_run.h"
#include "how_long.h"
#include "io/fault_injection.h"

namespace kvswap {

constexpr int64_t kBatch = 2;
constexpr int64_t kParts = kBatch * 2;  // of two layers
constexpr int64_t kWindow = 20;         // more than one call of the kernel takes
// Each read fails once, or where that takes too long one in so many.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kEvery = 9;
#else
inline const uint64_t kEvery = stride(4);
#endif

inline EngineOptions keeping_options(const std::string& directory,
                                     const std::string& rows = "box") {
  EngineOptions options = small_options(directory);
  options.rows = rows;
  options.ranks.clear();
  options.head_dim = 64;
  options.tail_tokens = 4;
  options.keeper = "observed";
  options.keep_tokens = 10;
  options.keep_window = kWindow;
  options.keep_interval = 5;
  return options;
}

/// Engines that are told the same: a prompt, what its newest queries attended, and steps.
class Pair {
 public:
  Pair(const EngineOptions& one, const EngineOptions& other) : one_(one, 5), other_(other, 5) {
    for (int64_t layer = 0; layer < one.layers; ++layer) {
      const Tokens drawn = one_.draw_tokens(kBatch, 150);
      RetainedTokens::Window window;
      window.count = kWindow;
      window.first_position = 150 - kWindow;
      window.scale = 0.1f;
      const std::vector<float> queries = one_.numbers(one.query_heads * kWindow * one.head_dim, 2);
      const auto* bytes = reinterpret_cast<const std::byte*>(queries.data());
      window.queries.assign(bytes, bytes + queries.size() * sizeof(float));
      window.log_sum_exp.assign(one.query_heads * kWindow, 8.0f);
      set_projections(one, layer);
      for (EngineRun* run : {&one_, &other_}) {
        EXPECT_TRUE(run->give(layer, drawn, kBatch).is_ok());
        for (int64_t part = 0; part < kBatch; ++part)
          run->engine().retention().observe_chunk(layer, part, window);
      }
    }
  }

  /// A step of the other engine; of the first as often as it takes. Returns how often that was.
  int64_t step(int64_t layer, ReadFaults& faults) {
    const Tokens drawn = one_.draw_tokens(kBatch, 1);
    const std::vector<float> query = one_.draw_query(kBatch, 1);
    for (EngineRun* run : {&one_, &other_}) {
      EXPECT_TRUE(run->give(layer, drawn, kBatch).is_ok());
    }
    std::vector<std::byte> expected;
    EXPECT_TRUE(other_.attend(layer, query, 1, expected).is_ok());
    std::vector<std::byte> output;
    for (int64_t tries = 1;; ++tries) {
      const double retained = tokens_retained(one_.engine());
      const Status attended = one_.attend(layer, query, 1, output);
      if (attended.is_ok()) {
        EXPECT_EQ(output, expected);
        return tries;
      }
      EXPECT_EQ(attended.code(), StatusCode::kStorage) << attended.message();
      EXPECT_GE(tokens_retained(one_.engine()), retained) << "a sequence's old set stays";
      faults = {};
    }
  }
  EngineRun& one() { return one_; }
  EngineRun& other() { return other_; }

 private:
  void set_projections(const EngineOptions& options, int64_t layer) {
    if (options.ranks.empty()) return;
    const int64_t rank = options.ranks[layer];
    const int64_t count = options.kv_heads * options.head_dim * rank;
    const std::vector<float> keys = one_.numbers(count, 2);
    const std::vector<float> queries = one_.numbers(count, 2);
    for (EngineRun* run : {&one_, &other_}) {
      EXPECT_TRUE(run->engine().set_projection(layer, rank, keys.data(), queries.data()).is_ok());
    }
  }

  EngineRun one_;
  EngineRun other_;
};

inline EngineOptions disk_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keep_scores = "disk";
  return options;
}

inline EngineOptions shared_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keep_share = "auto";
  options.groups_max = 12;
  options.pages_max = 24;
  return options;
}

inline EngineOptions joining_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "arkv";
  options.keep_interval = 0;
  options.keep_variance = 263.8;
  return options;
}

inline EngineOptions mixed_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = joining_options(directory, rows);
  options.keep_ratio = 0.3;
  return options;
}

inline EngineOptions divided_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "cake";
  options.keep_interval = 0;
  options.keep_variance = 200.0;
  return options;
}

inline EngineOptions outlier_options(const std::string& directory, const std::string& rows) {
  EngineOptions options = keeping_options(directory, rows);
  options.keeper = "outliers";
  options.keep_interval = 0;
  options.keep_window = Settings().keep_window;
  options.keep_tokens = 12;
  return options;
}

using MakeOptions = EngineOptions (*)(const std::string&, const std::string&);

/// So many turns of all layers and sequences in 8 steps, whatever read fails; on a device too,
/// where one is given.
inline void expect_right_after_faults(MakeOptions made, const std::string& rows, uint64_t refreshes,
                                      double retained, uint64_t reads = 60,
                                      const std::optional<DeviceKind>& device = std::nullopt) {
  int64_t failures = 0;
  for (uint64_t read = 1; read <= reads && !testing::Test::HasFailure(); read += kEvery) {
    SCOPED_TRACE(read);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = made(directory.path(), rows);
    const EngineOptions undisturbed = options;
    options.merge_bytes_max = 4096;
    options.merge_gap_bytes = 0;
    options.device = device;
    options.wrap_reader = [&](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    Pair pair(options, undisturbed);
    faults = {};
    faults.fail_read = read;
    for (int64_t step = 0; step < 8; ++step) {
      for (const int64_t layer : {0, 1}) failures += pair.step(layer, faults) - 1;
    }
    EXPECT_EQ(pair.one().engine().context().counters.refreshes, refreshes);
    EXPECT_EQ(tokens_retained(pair.one().engine()), retained);
    EXPECT_EQ(tokens_retained(pair.other().engine()), retained);
  }
  EXPECT_GT(failures, static_cast<int64_t>(std::min<uint64_t>(50, reads - 10) / kEvery));
}

inline void expect_counted(EngineOptions options) {
  const int64_t record_bytes = options.payload_bytes();
  options.kv_memory_bytes = 4 << 20;  // write buffers follow from it
  const Arena need = memory_need(options, record_bytes, kBatch, 200);
  const int64_t token_bytes = 2 * options.kv_heads * options.head_dim * 4;
  EXPECT_GE(need.of(Use::kRetained), kBatch * options.layers * options.keep_tokens * token_bytes);
  options.max_batch = kBatch;
  options.max_context = 200;
  ReadFaults faults;
  Pair pair(options, options);
  for (int64_t step = 0; step < 20; ++step) {
    for (const int64_t layer : {0, 1}) EXPECT_EQ(pair.step(layer, faults), 1);
  }
  const Ledger& ledger = pair.one().engine().context().ledger;
  EXPECT_EQ(ledger.used(Use::kRetained), need.of(Use::kRetained));
  EXPECT_LE(ledger.peak(), need.total());
  ASSERT_TRUE(pair.one().engine().reset().is_ok());
  EXPECT_EQ(tokens_retained(pair.one().engine()), 0);
  options.kv_memory_bytes = need.total() / 2;
  EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kBudget);
}

}  // namespace kvswap
