// Clusters of one row. That they decide as the reference does, test_engine_clusters.py holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "kernels/cpu_features.h"
#include "methods/clusters/adaptive_clusters.h"

namespace kvswap {
namespace {

enum class Kind { kNormal, kEqual, kFew, kMoving, kOdd };

struct Keys {
  Keys(Kind kind, int64_t tokens, int64_t width, uint32_t seed) : width(width) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens * width; ++i) numbers.push_back(normal(generator));
    for (int64_t token = 0; token < tokens; ++token) {
      float* key = numbers.data() + token * width;
      if (kind == Kind::kEqual) std::copy_n(numbers.data(), width, key);
      if (kind == Kind::kFew) std::copy_n(numbers.data() + generator() % 3 * width, width, key);
      if (kind == Kind::kMoving) key[0] += static_cast<float>(token) / 10;
      if (kind == Kind::kOdd && generator() % 10 == 0) {
        key[generator() % width] = generator() % 2 ? std::numeric_limits<float>::quiet_NaN()
                                                   : std::numeric_limits<float>::infinity();
      }
      if (kind == Kind::kOdd && generator() % 10 == 0) key[0] *= 3e38f;
    }
  }

  KeyRows rows() const { return {.data = numbers.data(), .width = width, .stride = width}; }

  int64_t width;
  std::vector<float> numbers;
};

bool no_pages(int64_t) { return false; }

/// What must hold after every call. Of a cropped row centroids may be of tokens that are gone, and
/// a cluster may have lost all of its own.
void check(const AdaptiveClusters& row, const Keys& keys, const ClusterOptions& options,
           int64_t left, bool is_cropped = false) {
  const ClusterTable& table = row.table();
  const auto tokens = static_cast<int64_t>(table.place().size());
  ASSERT_EQ(row.left(), std::max(left, std::min(options.sink_tokens, tokens)));
  ASSERT_LE(table.count(), table.clusters_max());
  ASSERT_EQ(table.clusters_max(), std::ceil(1.25 * tokens / options.cluster_tokens));
  std::vector<std::vector<int64_t>> members(table.count());
  int64_t pending = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t where = table.place()[token];
    if (token < options.sink_tokens) {
      ASSERT_EQ(where, kInSinks);
    } else if (token >= row.left()) {
      ASSERT_EQ(where, kInTail);
    } else if (where == kIsPending) {
      ++pending;
    } else {
      ASSERT_GE(where, 0);
      ASSERT_LT(where, table.count());
      members[where].push_back(token);
    }
  }
  ASSERT_EQ(pending, row.waiting().count());
  ASSERT_LT(pending, std::max<int64_t>(1, options.waiting_max()));
  std::vector<float> centroid(keys.width);
  const std::vector<int64_t> waited_for = row.waiting().clusters();
  int64_t clusters = 0;  // no number is lost
  for (int64_t c = 0; c < table.count(); ++c) {
    clusters += !members[c].empty() || std::ranges::binary_search(waited_for, c) ? 1 : 0;
  }
  ASSERT_EQ(table.numbers().used(), clusters);
  ASSERT_EQ(table.numbers().left(), table.clusters_max() - clusters);
  for (int64_t c = 0; c < table.count(); ++c) {
    ASSERT_EQ(members[c], members_of(row, c));
    ASSERT_EQ(static_cast<int64_t>(members[c].size()), table.size()[c]);
    ASSERT_GE(table.size()[c], is_cropped ? 0 : 1);
    ASSERT_LE(table.comparable()[c], table.size()[c]);
    ASSERT_LE(table.size()[c], options.cluster_tokens_max);
    table.centroid(c, centroid);
    // Static ones stay what the prompt's were.
    if (options.update == ClusterUpdate::kStatic || is_cropped) continue;
    const MeanVariance expected = mean_variance(keys.rows(), members[c]);
    const double scale = std::max(1.0, expected.variance);
    ASSERT_NEAR(table.variance()[c], expected.variance, 1e-4 * scale);
    for (int64_t d = 0; d < keys.width; ++d) {
      const double size = std::max(std::abs(expected.mean[d]), std::sqrt(scale));
      ASSERT_NEAR(centroid[d], expected.mean[d], 1e-5 * size);
    }
  }
}

TEST(AdaptiveClusters, EveryTokenIsInExactlyOnePlaceOverARandomLife) {
  std::mt19937 generator(11);
  for (int life = 0; life < 120; ++life) {
    const auto kind = static_cast<Kind>(life % 5);
    ClusterOptions options;
    options.update = static_cast<ClusterUpdate>(life % 3);
    options.cluster_tokens = 1 + generator() % 12;
    options.cluster_tokens_max = options.cluster_tokens + generator() % 12;
    options.split_factor = std::vector{0.2, 1.25, 4.0}[generator() % 3];
    options.pending_tokens = generator() % 6;
    options.sink_tokens = generator() % 5;
    const int64_t prompt = generator() % 700;
    const int64_t tokens = 1 + prompt + generator() % 60;
    const Keys keys(kind, tokens, std::vector{1, 2, 16}[generator() % 3], life);
    SCOPED_TRACE(life);
    AdaptiveClusters row(keys.width, tokens, options);
    row.enter_prompt(keys.rows(), prompt, {});
    check(row, keys, options, prompt);
    for (int64_t end = prompt; end < tokens && !testing::Test::HasFatalFailure();) {
      end = std::min<int64_t>(tokens, end + 1 + generator() % 4);
      std::vector<int64_t> read;
      for (int64_t c = 0; c < row.table().count(); ++c) {
        if (generator() % 5 == 0) read.push_back(c);
      }
      row.enter(keys.rows(), end, read);
      check(row, keys, options, end);
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

void expect_same_bits(const AdaptiveClusters& one, const AdaptiveClusters& other, int64_t width);

/// A crop, and what it must leave: every earlier token where it was, and numbers for new clusters.
void crop(AdaptiveClusters& row, const Keys& keys, const ClusterOptions& options, int64_t cut) {
  SCOPED_TRACE("crop to " + std::to_string(cut));
  const std::vector<int32_t> before(row.table().place().begin(), row.table().place().end());
  row.truncate(cut, no_pages);
  check(row, keys, options, cut, true);
  if (testing::Test::HasFatalFailure()) return;
  ASSERT_TRUE(std::equal(before.begin(), before.begin() + cut, row.table().place().begin()));
  const auto sizes = row.table().size();
  ASSERT_TRUE(sizes.empty() || sizes.back() > 0);
  for (const auto& [cluster, token] : row.waiting().all()) {
    ASSERT_LT(token, cut);
    if (cluster == PendingTokens::kNoCluster) continue;
    ASSERT_LT(cluster, row.table().count());
    ASSERT_GT(row.table().size()[cluster], 0);
  }
  ASSERT_TRUE(row.changed().empty());
  ASSERT_TRUE(!sizes.empty() || !row.threshold().variance);
}

TEST(AdaptiveClusters, EveryTokenIsInExactlyOnePlaceAfterEveryCrop) {
  std::mt19937 generator(23);
  for (int life = 0; life < 120 && !testing::Test::HasFatalFailure(); ++life) {
    SCOPED_TRACE(life);
    ClusterOptions options;
    options.update = static_cast<ClusterUpdate>(life % 3);
    options.cluster_tokens = 1 + generator() % 12;
    options.cluster_tokens_max = options.cluster_tokens + generator() % 12;
    options.split_factor = std::vector{0.2, 1.25, 4.0}[generator() % 3];
    options.pending_tokens = generator() % 6;
    options.sink_tokens = generator() % 9;
    const int64_t tokens = 600 + generator() % 300;
    const Keys keys(static_cast<Kind>(life % 5), tokens, std::vector{1, 2, 16}[generator() % 3],
                    life);
    AdaptiveClusters row(keys.width, tokens, options);
    row.enter_prompt(keys.rows(), 520 + generator() % 60, {});
    const auto decode = [&](int64_t steps) {
      for (; steps > 0 && row.left() < tokens && !testing::Test::HasFatalFailure(); --steps) {
        const int64_t end = std::min<int64_t>(tokens, row.left() + 1 + generator() % 4);
        std::vector<int64_t> read;
        for (int64_t c = 0; c < row.table().count(); ++c) {
          if (generator() % 5 == 0) read.push_back(c);
        }
        row.enter(keys.rows(), end, read);
        check(row, keys, options, end, true);
      }
    };
    decode(20);
    // Every position once, on a copy that goes on; and further and further down in one.
    for (int64_t cut = life % 7; cut < row.left(); cut += 7) {
      AdaptiveClusters copy = row;
      crop(copy, keys, options, cut);
      std::swap(copy, row);
      if (cut % 3 == 0) decode(3);
      std::swap(copy, row);
      if (testing::Test::HasFatalFailure()) return;
    }
    while (row.left() > options.sink_tokens && !testing::Test::HasFatalFailure()) {
      crop(row, keys, options, row.left() - std::min<int64_t>(row.left(), 1 + generator() % 60));
      if (generator() % 3 == 0) decode(4);
      if (generator() % 4 == 0) {
        const int64_t end = std::min<int64_t>(tokens, row.left() + 40);
        row.enter_prompt(keys.rows(), end, {});
        check(row, keys, options, end, true);
      }
    }
    if (testing::Test::HasFatalFailure()) return;
    // As if nothing had been before.
    AdaptiveClusters fresh(keys.width, tokens, options);
    row.truncate(0, no_pages);
    fresh.enter_prompt(keys.rows(), tokens, {});
    row.enter_prompt(keys.rows(), tokens, {});
    expect_same_bits(row, fresh, keys.width);
    EXPECT_EQ(row.threshold(), fresh.threshold());
  }
}

/// Of a row's tokens, the mean variance of their clusters.
double spread_of(const AdaptiveClusters& row) {
  double sum = 0;
  for (int64_t c = 0; c < row.table().count(); ++c) {
    sum += row.table().size()[c] * row.table().variance()[c];
  }
  return sum / static_cast<double>(row.left());
}

int64_t empty_numbers(const AdaptiveClusters& row) {
  return std::ranges::count(row.table().size(), 0);
}

/// Else crops would leave fewer and fewer numbers, and wider and wider clusters.
TEST(AdaptiveClusters, NumbersThatACropHasEmptiedAreGivenAgain) {
  constexpr int64_t kTokens = 3000;
  for (const auto update :
       {ClusterUpdate::kAdaptive, ClusterUpdate::kStatic, ClusterUpdate::kLocal}) {
    for (const int64_t prompt : {1100, 2000, 2800}) {  // the rest is decoded
      SCOPED_TRACE(testing::Message() << static_cast<int>(update) << " " << prompt);
      const Keys keys(Kind::kMoving, kTokens, 8, 3);
      const ClusterOptions options{
          .cluster_tokens = 16, .cluster_tokens_max = 32, .update = update};
      std::mt19937 generator(1);
      const auto regrow = [&](AdaptiveClusters& row) {
        if (row.left() < prompt) row.enter_prompt(keys.rows(), prompt, {});
        while (row.left() < kTokens) {
          std::vector<int64_t> read;
          for (int64_t c = 0; c < row.table().count(); ++c) {
            if (generator() % 8 == 0) read.push_back(c);
          }
          row.enter(keys.rows(), row.left() + 1, read);
        }
      };
      AdaptiveClusters fresh(8, kTokens, options);
      regrow(fresh);
      AdaptiveClusters row(8, kTokens, options);
      regrow(row);
      for (int cycle = 0; cycle < 12; ++cycle) {
        row.truncate(1000 + generator() % 1500, no_pages);
        regrow(row);
        ASSERT_EQ(row.table().numbers().used(), row.table().count() - empty_numbers(row));
        ASSERT_GE(row.table().numbers().left(), empty_numbers(row));
      }
      row.truncate(1000, no_pages);
      regrow(row);
      EXPECT_EQ(empty_numbers(row), 0);
      EXPECT_LT(spread_of(row), 1.1 * spread_of(fresh));
      EXPECT_EQ(row.counts().refused, fresh.counts().refused);
    }
  }
}

/// Of the tokens that settled it some are gone: those that are left say what is too wide.
TEST(AdaptiveClusters, AThresholdOfTokensThatAreGoneIsSettledAgain) {
  constexpr int64_t kTokens = 2000;
  Keys keys(Kind::kNormal, kTokens, 8, 3);
  for (int64_t i = 1200 * 8; i < kTokens * 8; ++i) keys.numbers[i] = 50 + 10 * keys.numbers[i];
  const ClusterOptions options{.cluster_tokens = 16, .cluster_tokens_max = 32};
  AdaptiveClusters whole(8, kTokens, options);
  whole.enter_prompt(keys.rows(), 1500, {});
  whole.enter_prompt(keys.rows(), kTokens, {});
  ASSERT_EQ(whole.threshold().settled_at, 1500);
  for (int64_t cut = 10; cut < kTokens; cut += 10) {
    SCOPED_TRACE(cut);
    AdaptiveClusters row = whole;
    row.truncate(cut, no_pages);
    if (cut >= 1500) {
      ASSERT_EQ(row.threshold(), whole.threshold());
      continue;
    }
    ASSERT_EQ(row.threshold().variance.has_value(), cut >= 512);
    ASSERT_EQ(row.threshold().settled_at, cut >= 512 ? cut : 0);
    if (cut >= 512) {
      ASSERT_DOUBLE_EQ(*row.threshold().variance, 1.25 * spread_of(row));
    }
    if (cut > 1200) continue;
    AdaptiveClusters fresh(8, kTokens, options);
    fresh.enter_prompt(keys.rows(), cut, {});
    if (cut >= 512) {
      ASSERT_LT(*row.threshold().variance, 1.5 * *fresh.threshold().variance);
    }
    // And no crop to the same place changes it again.
    row.enter_prompt(keys.rows(), 1200, {});
    const SplitThreshold settled = row.threshold();
    row.truncate(std::max<int64_t>(cut, row.threshold().settled_at), no_pages);
    ASSERT_EQ(row.threshold(), settled);
  }
}

/// What is left of the first tokens alone is no cluster.
TEST(AdaptiveClusters, SinksStaySinksWhereverACropCuts) {
  const Keys keys(Kind::kNormal, 600, 4, 3);
  const ClusterOptions options{.cluster_tokens = 8, .cluster_tokens_max = 16, .sink_tokens = 6};
  for (int64_t cut = 0; cut <= 8; ++cut) {
    AdaptiveClusters row(4, 600, options);
    row.enter_prompt(keys.rows(), 600, {});
    row.truncate(cut, no_pages);
    EXPECT_EQ(row.left(), std::max<int64_t>(cut, 6));
    row.enter_prompt(keys.rows(), 600, {});
    for (int64_t token = 0; token < 6; ++token) EXPECT_EQ(row.table().place()[token], kInSinks);
  }
}

TEST(AdaptiveClusters, LookingAheadChangesNoChoice) {
  std::mt19937 generator(17);
  for (int life = 0; life < 60; ++life) {
    SCOPED_TRACE(life);
    ClusterOptions options;
    options.update = static_cast<ClusterUpdate>(life % 3);
    options.cluster_tokens = 1 + generator() % 12;
    options.cluster_tokens_max = options.cluster_tokens + generator() % 12;
    options.split_factor = std::vector{0.2, 1.25, 4.0}[generator() % 3];
    const int64_t tokens = 400 + generator() % 400;
    const Keys keys(static_cast<Kind>(life % 5), tokens, std::vector{1, 2, 16}[life % 3], life);
    AdaptiveClusters row(keys.width, tokens, options);
    row.enter_prompt(keys.rows(), tokens / 2, {});
    AdaptiveClusters ahead = row;
    const uint32_t read = 1 + generator() % 4;
    const auto is_read = [&](int64_t cluster) { return cluster % read == 0; };
    while (row.left() < tokens) {
      const int64_t end = std::min<int64_t>(tokens, row.left() + 1 + generator() % 20);
      ahead.look_ahead(keys.rows(), end);
      for (int64_t token = row.left(); token < end; ++token) {
        row.enter_token(keys.rows(), token, is_read);
        ahead.enter_token(keys.rows(), token, is_read);
      }
      row.end_step();
      ahead.end_step();
      ASSERT_TRUE(std::ranges::equal(row.table().place(), ahead.table().place()));
      ASSERT_TRUE(std::ranges::equal(row.table().variance(), ahead.table().variance()));
    }
  }
}

TEST(AdaptiveClusters, StaticOnesOnlyGrowUntilNoneHasRoom) {
  const Keys keys(Kind::kNormal, 400, 4, 7);
  const ClusterOptions options{
      .cluster_tokens = 10, .cluster_tokens_max = 12, .update = ClusterUpdate::kStatic};
  AdaptiveClusters row(4, 400, options);
  row.enter_prompt(keys.rows(), 300, {});
  const AdaptiveClusters before = row;
  const int64_t count = before.table().count();
  const int64_t room = 12 * count - 300;
  ASSERT_GT(room, 10);
  std::vector<float> was(4), is(4);
  for (int64_t end = 301; end <= 400; ++end) {
    EXPECT_TRUE(row.enter(keys.rows(), end, {}).empty());
    EXPECT_EQ(row.table().count() > count, end - 300 > room) << end;
    EXPECT_EQ(row.waiting().count(), 0);
  }
  EXPECT_EQ(row.counts().splits, before.counts().splits);
  for (int64_t c = 0; c < count; ++c) {
    before.table().centroid(c, was);
    row.table().centroid(c, is);
    EXPECT_EQ(is, was);
    EXPECT_EQ(row.table().variance()[c], before.table().variance()[c]);
  }
}

TEST(AdaptiveClusters, LocalOnesLeaveThePromptsAsTheyAre) {
  const Keys keys(Kind::kNormal, 400, 4, 7);
  const ClusterOptions options{
      .cluster_tokens = 10, .cluster_tokens_max = 30, .update = ClusterUpdate::kLocal};
  AdaptiveClusters row(4, 400, options);
  row.enter_prompt(keys.rows(), 300, {});
  const AdaptiveClusters before = row;
  for (int64_t end = 301; end <= 400; ++end) {
    row.enter(keys.rows(), end, {});
    EXPECT_EQ(row.waiting().count(), (end - 300) % 40);
    EXPECT_TRUE(row.changed().empty()) << "the step has ended";
  }
  EXPECT_GE(row.table().count(), before.table().count() + 8);
  for (int64_t token = 0; token < 300; ++token) {
    EXPECT_EQ(row.table().place()[token], before.table().place()[token]);
  }
  for (int64_t token = 300; token < 380; ++token) {
    EXPECT_GE(row.table().place()[token], before.table().count());
  }
}

TEST(AdaptiveClusters, NothingToEnterChangesNothing) {
  const Keys keys(Kind::kNormal, 8, 2, 1);
  AdaptiveClusters row(2, 8, {.sink_tokens = 20});
  EXPECT_EQ(row.left(), 8) << "all are sinks";
  row.enter_prompt(keys.rows(), 8, {});
  EXPECT_TRUE(row.enter(keys.rows(), 8, {}).empty());
  EXPECT_EQ(row.table().count(), 0);
  AdaptiveClusters empty(2, 8, {});
  empty.enter_prompt(keys.rows(), 0, {});
  EXPECT_TRUE(empty.enter(keys.rows(), 0, {}).empty());
  EXPECT_EQ(empty.left(), 0);
}

/// Looks at keys of clusters that were read, of what waits, and of the new tokens: the others are
/// on disk. At the limit a full row looks at that which it joins, too.
TEST(AdaptiveClusters, LookAtNoKeyThatWasNotRead) {
  const Keys known(Kind::kMoving, 1000, 8, 21);
  const ClusterOptions options{.cluster_tokens = 20, .cluster_tokens_max = 40};
  AdaptiveClusters row(8, 4000, options);  // far from the limit
  row.enter_prompt(known.rows(), 800, {});
  AdaptiveClusters expected = row;
  std::mt19937 generator(5);
  for (int64_t end = 801; end <= 1000; ++end) {
    std::vector<int64_t> read;
    for (int64_t c = 0; c < row.table().count(); ++c) {
      if (generator() % 4 == 0) read.push_back(c);
    }
    Keys some = known;
    for (int64_t token = 0; token < row.left(); ++token) {
      const int32_t where = row.table().place()[token];
      if (where >= 0 && !std::binary_search(read.begin(), read.end(), where)) {
        std::fill_n(some.numbers.begin() + token * 8, 8, 12345.0f);
      }
    }
    const auto forced = expected.enter(known.rows(), end, read);
    if (!forced.empty()) {  // read besides
      row = expected;
      continue;
    }
    row.enter(some.rows(), end, read);
    ASSERT_TRUE(std::ranges::equal(row.table().place(), expected.table().place())) << end;
    ASSERT_TRUE(std::ranges::equal(row.table().variance(), expected.table().variance())) << end;
  }
  EXPECT_GT(expected.counts().splits, 5);
}

AdaptiveClusters life_of(const Keys& keys, const Execution& execution, ClusterUpdate update) {
  AdaptiveClusters row(keys.width, 1600,
                       {.cluster_tokens = 8, .cluster_tokens_max = 16, .update = update});
  row.enter_prompt(keys.rows(), 1400, execution);
  for (int64_t end = 1404; end <= 1600; end += 4) {
    std::vector<int64_t> read;
    for (int64_t c = end % 3; c < row.table().count(); c += 3) read.push_back(c);
    row.enter(keys.rows(), end, read);
  }
  return row;
}

void expect_same_bits(const AdaptiveClusters& one, const AdaptiveClusters& other, int64_t width) {
  EXPECT_TRUE(std::ranges::equal(one.table().place(), other.table().place()));
  EXPECT_TRUE(std::ranges::equal(one.table().variance(), other.table().variance()));
  ASSERT_EQ(one.table().count(), other.table().count());
  std::vector<float> a(width), b(width);
  for (int64_t c = 0; c < one.table().count(); ++c) {
    one.table().centroid(c, a);
    other.table().centroid(c, b);
    EXPECT_EQ(a, b);
  }
}

TEST(AdaptiveClusters, InstructionSetsAndThreadsChangeNoBit) {
  const Keys keys(Kind::kNormal, 1600, 37, 31);
  const ParallelFor in_pieces = [](int64_t count, int64_t, const auto& body) {
    std::vector<std::thread> threads;
    for (int64_t begin = 0; begin < count; begin += 101) {
      threads.emplace_back([&, begin] { body(begin, std::min(count, begin + 101)); });
    }
    for (std::thread& thread : threads) thread.join();
  };
  for (const auto update :
       {ClusterUpdate::kAdaptive, ClusterUpdate::kStatic, ClusterUpdate::kLocal}) {
    ASSERT_TRUE(use_simd_level(simd_levels().front()));
    const AdaptiveClusters expected = life_of(keys, {}, update);
    for (const std::string& level : simd_levels()) {
      SCOPED_TRACE(level);
      ASSERT_TRUE(use_simd_level(level));
      expect_same_bits(life_of(keys, {}, update), expected, 37);
    }
    expect_same_bits(life_of(keys, {.parallel = &in_pieces}, update), expected, 37);
  }
}

TEST(AdaptiveClusters, OptionsThatMakeNoSenseHaveAFault) {
  EXPECT_EQ(ClusterOptions{}.fault(), "");
  EXPECT_NE((ClusterOptions{.cluster_tokens = 9, .cluster_tokens_max = 8}).fault(), "");
  EXPECT_NE((ClusterOptions{.split_factor = std::nan("")}).fault(), "");
  EXPECT_NE((ClusterOptions{.sink_tokens = -1}).fault(), "");
  EXPECT_EQ(parse_cluster_update("local"), ClusterUpdate::kLocal);
  EXPECT_EQ(parse_cluster_update("never"), std::nullopt);
}

}  // namespace
}  // namespace kvswap
