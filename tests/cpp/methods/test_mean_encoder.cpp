// Means of groups, and a group's worth to its best head, against their definitions.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "methods/one_choice.h"
#include "methods/selection/selector_factory.h"
#include "methods/selector_on_device.h"
#include "methods/summary/summary_store.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 6;
constexpr int64_t kDim = 8;
constexpr int64_t kGroup = 4;
constexpr int64_t kTokens = 600 * kGroup;

MethodOptions options_of(const std::string& rows, Score score, DType dtype) {
  return {.rows = rows,
          .layers = 2,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .group_tokens = kGroup,
          .exact_layers = {1},
          .summary_dtype = dtype,
          .score = score};
}

/// Whole numbers whose sums of four are whole numbers of quarters: exact at every precision.
struct Prompt {
  std::vector<float> keys;   // [kKvHeads, kTokens, kDim]
  std::vector<float> query;  // [kHeads, kDim]
  PaddingMask valid;
};

Prompt draw(uint64_t seed, int64_t padding) {
  std::mt19937_64 random(seed);
  const auto whole = [&](int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(static_cast<int64_t>(random() % 9) - 4);
    return values;
  };
  Prompt prompt = {
      .keys = whole(kKvHeads * kTokens * kDim), .query = whole(kHeads * kDim), .valid = {}};
  const auto none = std::make_unique<bool[]>(padding + 1);
  prompt.valid.append(padding, none.get());
  prompt.valid.append(kTokens - padding, nullptr);
  return prompt;
}

/// What a group is worth to each head: the product with the mean of its valid keys, or for boxes
/// the largest product that a key in the box can have.
double importance(const Prompt& prompt, const std::string& rows, int64_t head, int64_t group) {
  double sum = 0;
  for (int64_t d = 0; d < kDim; ++d) {
    double mean = 0;
    double largest = -1e30;
    int64_t count = 0;
    const double q = prompt.query[head * kDim + d];
    for (int64_t t = group * kGroup; t < (group + 1) * kGroup; ++t) {
      if (!prompt.valid.is_valid(t)) continue;
      const double key = prompt.keys[(head / 3 * kTokens + t) * kDim + d];
      mean += key;
      largest = std::max(largest, q * key);
      ++count;
    }
    sum += rows == "mean" ? q * mean / static_cast<double>(count) : largest;
  }
  return sum;
}

std::vector<int32_t> expected(const Prompt& prompt, const std::string& rows, Score score,
                              int64_t k) {
  std::vector<int32_t> groups;
  std::vector<double> importances(kTokens / kGroup);
  for (int64_t g = prompt.valid.first_valid() / kGroup; g < kTokens / kGroup; ++g) {
    double best = -1e30;
    double sum = 0;
    for (int64_t head = 0; head < kHeads; ++head) {
      const double of_head = importance(prompt, rows, head, g);
      best = std::max(best, of_head);
      sum += of_head;
    }
    importances[g] = score == Score::kMax ? best : sum;
    groups.push_back(static_cast<int32_t>(g));
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [&](int32_t a, int32_t b) { return importances[a] > importances[b]; });
  groups.resize(k);
  std::sort(groups.begin(), groups.end());
  return groups;
}

std::vector<int32_t> choice(Selector& selector, const Prompt& prompt, int64_t k) {
  selector.summaries().set_sequences(1);
  EXPECT_TRUE(selector
                  .append({.layer = 0,
                           .sequence = 0,
                           .keys = {prompt.keys.data(), kTokens * kDim, kDim},
                           .tokens = kTokens,
                           .valid = &prompt.valid})
                  .is_ok());
  return choose(selector, {.query = prompt.query,
                           .heads = kHeads,
                           .valid = prompt.valid,
                           .groups = kTokens / kGroup,
                           .k = k});
}

// Equal worths are many here: they go to the lower group.
TEST(MeanEncoder, ChooseAsTheDefinitionOnTheHostAndOnADevice) {
  for (const std::string rows : {"mean", "box"}) {
    for (const Score score : {Score::kSum, Score::kMax}) {
      // Means of 3 or fewer valid tokens are no whole quarters: padding fills whole groups.
      for (const int64_t padding : {0, 36}) {
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
          const Prompt prompt = draw(padding + 1, padding);
          const MethodOptions options = options_of(rows, score, dtype);
          const auto wanted = expected(prompt, rows, score, 7);
          ASSERT_EQ(choice(*make_selector(options, nullptr), prompt, 7), wanted) << rows;
          ASSERT_EQ(has_device_kernels(options), score == Score::kSum);
          OnDevice device({.delay_us_max = 50}, options,
                          {.batch = 1,
                           .queries = 1,
                           .groups = kTokens / kGroup,
                           .k = 7,
                           .rank = 2 * kKvHeads * kDim});
          ASSERT_EQ(choice(device.selector(), prompt, 7), wanted) << rows;
        }
      }
    }
  }
}

TEST(MeanEncoder, LevelsAreWithinHalfAStep) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> keys(kKvHeads * 16 * kDim);
  for (float& key : keys) key = normal(random);
  const auto rows =
      SummaryKind::find("mean")->make(options_of("mean", Score::kSum, DType::kInt8), {});
  const int64_t width = rows->shape(0).width;
  std::vector<std::byte> stored(16 * width);
  std::vector<float> scales(16);
  rows->write(0, {.keys = {keys.data(), 16 * kDim, kDim},
                  .tokens = 16,
                  .rows = stored.data(),
                  .row_scale = scales.data()});
  for (int64_t group = 0; group < 16 / kGroup; ++group) {
    for (int64_t channel = 0; channel < width; ++channel) {
      double mean = 0;
      for (int64_t t = 0; t < kGroup; ++t) {
        mean += keys[(channel / kDim * 16 + group * kGroup + t) * kDim + channel % kDim] / kGroup;
      }
      const double level = static_cast<int8_t>(stored[channel * 16 + group]);
      EXPECT_NEAR(level * scales[group], mean, scales[group] * 0.5001);
    }
  }
}

TEST(MeanEncoder, LayersThatAttendEverythingHaveNone) {
  const auto selector = make_selector(options_of("mean", Score::kSum, DType::kFloat32), nullptr);
  selector->summaries().set_sequences(1);
  EXPECT_TRUE(selector->is_ready(0));
  EXPECT_FALSE(selector->is_ready(1));
  EXPECT_EQ(selector->summaries().bytes_to_append(1, 64), 0);
  const auto none = make_selector(options_of("none", Score::kSum, DType::kFloat32), nullptr);
  none->summaries().set_sequences(1);
  EXPECT_FALSE(none->is_ready(0));
  EXPECT_EQ(none->summaries().bytes_to_append(0, 64), 0);
}

}  // namespace
}  // namespace kvswap
