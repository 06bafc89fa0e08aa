// Keys, queries and projections are small whole numbers: scores are exact in every element type, so
// the choice must equal the reference's to the last tie.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "methods/selection/selector_factory.h"
#include "methods/selector_on_device.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 6;
constexpr int64_t kDim = 8;
constexpr int64_t kWidth = kKvHeads * kDim;

struct Case {
  int64_t group_tokens = 4;
  int64_t rank = 5;
  DType summary_dtype = DType::kFloat32;
  int64_t groups = 50;
  int64_t batch = 2;
  int64_t queries = 1;
  int64_t k = 6;
  int64_t piece_groups = 1000;  // appended at once
  int64_t sink_groups = 1;
  int64_t padding = 0;  // of the last sequence
  int64_t query_heads = kHeads;
  int64_t hole = 0;           // positions of padding in the middle of the first sequence
  int64_t score_columns = 0;  // of two stages
  double score_share = 0;
};

class Selection {
 public:
  Selection(const Case& of, uint32_t seed, Place place) : case_(of), random_(seed) {
    const MethodOptions options = {.layers = 2,
                                   .kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .group_tokens = of.group_tokens,
                                   .summary_dtype = of.summary_dtype,
                                   .score_columns = of.score_columns,
                                   .score_share = of.score_share};
    if (!place) {
      host_ = make_selector(options, nullptr);
      selector_ = host_.get();
    } else {
      device_ = std::make_unique<OnDevice>(*place, options,
                                           DeviceSelector::Room{.batch = of.batch,
                                                                .queries = of.queries,
                                                                .groups = of.groups,
                                                                .k = of.k,
                                                                .sinks = of.sink_groups,
                                                                .rank = of.rank});
      selector_ = &device_->selector();
    }
    key_projection_ = numbers(kWidth * of.rank, 1);
    query_projection_ = numbers(kWidth * of.rank, 1);
    std::vector<float> keys = key_projection_, queries = query_projection_;
    const Status set = selector_->set_projection(1, of.rank, keys.data(), queries.data());
    EXPECT_TRUE(set.is_ok()) << set.message();
    std::fill(keys.begin(), keys.end(), NAN);  // the caller's again
    std::fill(queries.begin(), queries.end(), NAN);
    selector_->summaries().set_sequences(of.batch);
    for (int64_t b = 0; b < of.batch; ++b) append_sequence(b);
    query_ = numbers(of.batch * of.query_heads * of.queries * kDim, 2);
  }

  std::vector<std::vector<int32_t>> choose() {
    std::vector<int32_t> sinks;
    for (int32_t g = 0; g < case_.sink_groups; ++g) sinks.push_back(g);
    std::vector<Candidates> candidates;
    for (const PaddingMask& validity : validity_) candidates.push_back({&validity, sinks});
    std::vector<std::vector<int32_t>> chosen;
    selector_->choose({.layer = 1,
                       .query = {.data = query_.data(),
                                 .batch_stride = case_.query_heads * case_.queries * kDim,
                                 .head_stride = case_.queries * kDim,
                                 .query_stride = kDim,
                                 .heads = case_.query_heads,
                                 .queries = case_.queries},
                       .groups = case_.groups,
                       .groups_per_query = case_.k,
                       .candidates = candidates,
                       .chosen = &chosen});
    return chosen;
  }

  std::vector<std::vector<int32_t>> expected() const {
    std::vector<std::vector<int32_t>> chosen;
    for (int64_t b = 0; b < case_.batch; ++b) {
      std::set<int32_t> of_any_query;
      for (int64_t q = 0; q < case_.queries; ++q) {
        std::vector<std::pair<float, int32_t>> scored;
        const std::set<int64_t> blocks = second_stage(b, q);
        for (int64_t g = case_.sink_groups; g < case_.groups; ++g) {
          const float best = best_token(b, q, g, case_.rank);
          if (!blocks.contains(g / block_groups())) continue;
          if (best > -INFINITY) scored.push_back({-best, static_cast<int32_t>(g)});
        }
        std::sort(scored.begin(), scored.end());
        for (int64_t i = 0; i < std::min<int64_t>(case_.k, scored.size()); ++i) {
          of_any_query.insert(scored[i].second);
        }
      }
      chosen.emplace_back(of_any_query.begin(), of_any_query.end());
    }
    return chosen;
  }

 private:
  std::vector<float> numbers(int64_t count, int largest) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = static_cast<float>(static_cast<int>(random_() % (2 * largest + 1)) - largest);
    }
    return values;
  }

  void append_sequence(int64_t b) {
    const int64_t tokens = case_.groups * case_.group_tokens;
    keys_.push_back(numbers(kWidth * tokens, 2));
    const int64_t piece = case_.piece_groups * case_.group_tokens;
    for (int64_t first = 0; first < tokens; first += piece) {
      EXPECT_TRUE(selector_
                      ->append({.layer = 1,
                                .sequence = b,
                                .keys = {keys_[b].data() + first * kDim, tokens * kDim, kDim},
                                .tokens = std::min(piece, tokens - first)})
                      .is_ok());
    }
    validity_.emplace_back();
    const int64_t padding = b + 1 == case_.batch ? case_.padding : 0;
    const auto none = std::make_unique<bool[]>(padding + 1);
    validity_.back().append(padding, none.get());
    const int64_t hole = b == 0 ? std::min(case_.hole, (tokens - padding) / 2) : 0;
    validity_.back().append((tokens - padding - hole) / 2, nullptr);
    const auto gap = std::make_unique<bool[]>(hole + 1);
    validity_.back().append(hole, gap.get());
    validity_.back().append(tokens - validity_.back().positions(), nullptr);
  }

  int64_t block_groups() const { return std::lcm(16, case_.group_tokens) / case_.group_tokens; }

  /// Blocks whose groups are scored by all columns.
  std::set<int64_t> second_stage(int64_t b, int64_t q) const {
    const int64_t blocks = (case_.groups + block_groups() - 1) / block_groups();
    std::vector<std::pair<float, int64_t>> scored(blocks, {INFINITY, 0});
    for (int64_t g = 0; g < case_.groups; ++g) {
      auto& block = scored[g / block_groups()];
      block = {std::min(block.first, -best_token(b, q, g, case_.score_columns)),
               g / block_groups()};
    }
    const bool is_staged = case_.score_columns > 0 && case_.score_columns < case_.rank;
    const int64_t chunk = chunk_rows(case_.group_tokens, 1) / case_.group_tokens / block_groups();
    const int64_t wanted = std::min(case_.k, case_.groups);
    std::set<int64_t> best;
    for (int64_t first = 0; first < blocks; first += chunk) {
      const int64_t here = std::min(chunk, blocks - first);
      const auto shared = static_cast<int64_t>(std::ceil(case_.score_share * here));
      const int64_t least = (wanted * here + blocks - 1) / blocks;
      std::sort(scored.begin() + first, scored.begin() + first + here);
      const int64_t count = is_staged ? std::min(here, std::max(shared, least)) : here;
      for (int64_t i = 0; i < count; ++i) best.insert(scored[first + i].second);
    }
    return best;
  }

  float best_token(int64_t b, int64_t q, int64_t group, int64_t columns) const {
    float best = -INFINITY;
    for (int64_t t = group * case_.group_tokens; t < (group + 1) * case_.group_tokens; ++t) {
      if (validity_[b].is_valid(t)) best = std::max(best, score(b, q, t, columns));
    }
    return best;
  }

  /// By the first so many columns.
  float score(int64_t b, int64_t q, int64_t token, int64_t columns) const {
    const int64_t tokens = case_.groups * case_.group_tokens;
    std::vector<float> row(case_.rank);
    std::vector<float> projected(case_.rank);
    for (int64_t r = 0; r < case_.rank; ++r) {
      for (int64_t w = 0; w < kWidth; ++w) {
        row[r] += keys_[b][(w / kDim * tokens + token) * kDim + w % kDim] *
                  key_projection_[w * case_.rank + r];
      }
      for (int64_t h = 0; h < case_.query_heads; ++h) {
        const int64_t kv_head = h / (case_.query_heads / kKvHeads);
        for (int64_t d = 0; d < kDim; ++d) {
          projected[r] += query_[((b * case_.query_heads + h) * case_.queries + q) * kDim + d] *
                          query_projection_[(kv_head * kDim + d) * case_.rank + r];
        }
      }
    }
    float scale = 1;
    if (has_row_scales(case_.summary_dtype)) {
      float largest = 0;
      for (const float value : row) largest = std::max(largest, std::fabs(value));
      scale = largest / (case_.summary_dtype == DType::kInt8 ? 127.0f : 7.0f);
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      for (float& value : row) value = std::nearbyint(value * inverse);
    }
    float sum = 0;
    for (int64_t r = 0; r < columns; ++r) sum += row[r] * projected[r];
    return sum * scale;
  }

  Case case_;
  std::mt19937 random_;
  std::unique_ptr<Selector> host_;
  std::unique_ptr<OnDevice> device_;
  Selector* selector_ = nullptr;
  std::vector<float> key_projection_;
  std::vector<float> query_projection_;
  std::vector<std::vector<float>> keys_;  // [batch][kv_heads, tokens, head_dim]
  std::vector<PaddingMask> validity_;
  std::vector<float> query_;
};

void expect_reference(const Case& of) {
  const bool is_hosts = of.score_columns > 0 || of.summary_dtype == DType::kInt4;
  for (uint32_t seed = 0; seed < 6; seed += is_hosts ? 2 : 1) {
    const Place device = HostDeviceOptions{.delay_us_max = 50};
    Selection selection(of, seed / 2, seed % 2 == 0 ? std::nullopt : device);
    ASSERT_EQ(selection.choose(), selection.expected())
        << "G " << of.group_tokens << ", rank " << of.rank << ", seed " << seed;
    ASSERT_EQ(selection.choose(), selection.expected()) << "a second time";
  }
}

TEST(SummarySelector, ChoosesAsTheReferenceForEveryGroupSize) {
  for (const int64_t group_tokens : {1, 2, 3, 4, 7, 12, 16, 33, 64}) {
    for (const int64_t groups : {1, 2, 30, 1100 / static_cast<int>(group_tokens) + 1}) {
      expect_reference({.group_tokens = group_tokens, .groups = groups});
    }
  }
}

TEST(SummarySelector, ChoosesAsTheReferenceForEveryRankAndElementType) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kInt4}) {
    for (const int64_t rank : {1, 2, 5, 8, 13, 16}) {
      expect_reference({.rank = rank, .summary_dtype = dtype});
    }
  }
}

TEST(SummarySelector, QueriesPaddingSinksAndSmallBudgets) {
  expect_reference({.queries = 4, .k = 3});
  expect_reference({.batch = 3, .queries = 16, .k = 1});
  expect_reference({.padding = 61});
  expect_reference({.hole = 37});
  expect_reference({.groups = 300, .batch = 3, .queries = 2, .padding = 9, .hole = 500});
  expect_reference({.batch = 1, .padding = 200});  // nothing but padding
  expect_reference({.sink_groups = 0});
  expect_reference({.sink_groups = 60});
  expect_reference({.k = 1});
  expect_reference({.k = 1000});
  expect_reference({.query_heads = kKvHeads});
}

TEST(SummarySelector, InTwoStagesTheBestBlocksOfAChunkAreScoredByAllColumns) {
  for (const int64_t group_tokens : {1, 3, 16, 64}) {
    expect_reference({.group_tokens = group_tokens,
                      .groups = 1100 / group_tokens + 1,
                      .batch = 1,
                      .k = 3,
                      .score_columns = 3,
                      .score_share = 0.1});
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
    expect_reference({.summary_dtype = dtype,
                      .groups = 300,
                      .queries = 2,
                      .piece_groups = 17,
                      .padding = 90,
                      .hole = 200,
                      .score_columns = 2,
                      .score_share = 0.2});
  }
  // Nothing but padding; no more columns than are asked for.
  expect_reference(
      {.groups = 100, .batch = 1, .padding = 400, .score_columns = 2, .score_share = 0.1});
  expect_reference({.groups = 100, .score_columns = 5, .score_share = 0.1});
}

TEST(SummarySelector, WaitsForAStreamThatIsFarBehind) {
  for (const Stream slow : {Stream::kCompute, Stream::kScore}) {
    Selection selection({}, 1, HostDeviceOptions{.slow = slow, .slow_us = 10000});
    EXPECT_EQ(selection.choose(), selection.expected());
    EXPECT_EQ(selection.choose(), selection.expected()) << "a second time";
  }
}

TEST(SummarySelector, PieceByPieceIsTheSameAsAtOnce) {
  for (const int64_t group_tokens : {3, 4, 64}) {
    for (const int64_t piece : {1, 2, 5, 17}) {
      expect_reference(
          {.group_tokens = group_tokens, .groups = 400, .piece_groups = piece, .padding = 5});
    }
  }
}

TEST(SummarySelector, BytesToAppendAreWhatAppendTakesAlsoOfSharedPasts) {
  std::mt19937 random(3);
  const auto made = make_selector({.layers = 1,
                                   .kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .group_tokens = 4,
                                   .summary_dtype = DType::kFloat32},
                                  nullptr);
  Selector& selector = *made;
  EXPECT_EQ(selector.summaries().bytes_to_append(0, 100), 0) << "without a projection";
  const std::vector<float> ones(kWidth * 5, 1.0f);
  ASSERT_TRUE(selector.set_projection(0, 5, ones.data(), ones.data()).is_ok());
  selector.summaries().set_sequences(2);
  int64_t batch = 2;
  for (int step = 0; step < 200; ++step) {
    const int64_t tokens = 4 * (1 + random() % 120);
    const int64_t before = selector.summaries().resident_bytes();
    const int64_t expected = selector.summaries().bytes_to_append(0, tokens);
    const std::vector<float> keys(kWidth * tokens, 1.0f);
    for (int64_t b = 0; b < batch; ++b) {
      ASSERT_TRUE(selector
                      .append({.layer = 0,
                               .sequence = b,
                               .keys = {keys.data(), tokens * kDim, kDim},
                               .tokens = tokens})
                      .is_ok());
    }
    ASSERT_EQ(selector.summaries().resident_bytes() - before, expected);
    if (random() % 2) {
      std::vector<int64_t> indices(1 + random() % 4);
      for (int64_t& index : indices) index = random() % batch;
      selector.summaries().select_sequences(indices);
      batch = static_cast<int64_t>(indices.size());
    }
    if (random() % 8 == 0) selector.summaries().truncate(0, selector.summaries().tokens(0) / 8 * 4);
  }
  selector.drop_projection(0);
  EXPECT_EQ(selector.summaries().resident_bytes(), 0);
  EXPECT_EQ(selector.projection_bytes(), 0);
  EXPECT_FALSE(selector.is_ready(0));
}

TEST(SummarySelector, ChunksHoldWholeGroupsAndWholeBlocks) {
  for (int64_t group_tokens = 1; group_tokens <= 64; ++group_tokens) {
    const int64_t tokens = chunk_rows(group_tokens, 1);
    EXPECT_EQ(tokens % group_tokens, 0);
    EXPECT_EQ(tokens % 16, 0);
    EXPECT_LE(tokens, 1024);
    EXPECT_GT(tokens, 512);
  }
}

}  // namespace
}  // namespace kvswap
