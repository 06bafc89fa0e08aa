// Boxes against their definition, and against every key that they hold.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/low_rank_score.h"
#include "methods/one_choice.h"
#include "methods/selection/selector_factory.h"
#include "methods/selector_on_device.h"
#include "methods/summary/summary_store.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 4;
constexpr int64_t kDim = 8;

MethodOptions box_options(int64_t group_tokens, DType summary_dtype) {
  return {.rows = "box",
          .layers = 1,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .group_tokens = group_tokens,
          .summary_dtype = summary_dtype};
}

std::vector<float> whole_numbers(std::mt19937_64& random, int64_t count, int64_t largest) {
  std::vector<float> values(count);
  for (float& value : values) {
    value = static_cast<float>(static_cast<int64_t>(random() % (2 * largest + 1)) - largest);
  }
  return values;
}

struct Prompt {
  int64_t tokens = 0;
  std::vector<float> keys;   // [kKvHeads, tokens, kDim]
  std::vector<float> query;  // [kHeads, kDim]
  PaddingMask valid;

  float key(int64_t head, int64_t token, int64_t d) const {
    return keys[(head * tokens + token) * kDim + d];
  }
  /// The sum over heads of the largest product that a key in the group's box can have; with less
  /// weight on the box as much nearer to its middle's.
  double score(int64_t group, int64_t group_tokens, double weight) const {
    double sum = 0;
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t d = 0; d < kDim; ++d) {
        double largest = -1e30;
        double smallest = 1e30;
        for (int64_t t = group * group_tokens; t < (group + 1) * group_tokens; ++t) {
          if (!valid.is_valid(t)) continue;
          const double product = double{query[head * kDim + d]} * key(head / 2, t, d);
          largest = std::max(largest, product);
          smallest = std::min(smallest, product);
        }
        sum += weight * largest + (1 - weight) * (largest + smallest) / 2;
      }
    }
    return sum;
  }
};

Prompt draw(uint64_t seed, int64_t tokens, int64_t padding) {
  std::mt19937_64 random(seed);
  Prompt prompt = {.tokens = tokens,
                   .keys = whole_numbers(random, kKvHeads * tokens * kDim, 8),
                   .query = whole_numbers(random, kHeads * kDim, 3),
                   .valid = {}};
  const auto none = std::make_unique<bool[]>(padding + 1);
  prompt.valid.append(padding, none.get());
  prompt.valid.append(tokens - padding, nullptr);
  return prompt;
}

std::vector<int32_t> expected_choice(const Prompt& prompt, int64_t group_tokens, int64_t k,
                                     double weight = 1) {
  std::vector<int32_t> groups;
  const int64_t first = prompt.valid.first_valid() / group_tokens;
  for (int64_t g = first; g < prompt.tokens / group_tokens; ++g) {
    groups.push_back(static_cast<int32_t>(g));
  }
  std::stable_sort(groups.begin(), groups.end(), [&](int32_t a, int32_t b) {
    return prompt.score(a, group_tokens, weight) > prompt.score(b, group_tokens, weight);
  });
  groups.resize(std::min<size_t>(groups.size(), k));
  std::sort(groups.begin(), groups.end());
  return groups;
}

std::vector<int32_t> choice(Selector& selector, const Prompt& prompt, int64_t group_tokens,
                            int64_t k) {
  selector.summaries().set_sequences(1);
  // Two pieces: the second begins in the middle of the summary's block.
  const int64_t groups = prompt.tokens / group_tokens;
  const int64_t half = groups / 2 * group_tokens;
  for (const auto& [first, end] : {std::pair{int64_t{0}, half}, {half, groups * group_tokens}}) {
    EXPECT_TRUE(
        selector
            .append({.layer = 0,
                     .sequence = 0,
                     .keys = {prompt.keys.data() + first * kDim, prompt.tokens * kDim, kDim},
                     .tokens = end - first,
                     .valid = &prompt.valid})
            .is_ok());
  }
  return choose(
      selector,
      {.query = prompt.query, .heads = kHeads, .valid = prompt.valid, .groups = groups, .k = k});
}

DeviceSelector::Room room_of(const Prompt& prompt, int64_t group_tokens, int64_t k) {
  return {.batch = 1,
          .queries = 1,
          .groups = prompt.tokens / group_tokens,
          .k = k,
          .rank = 2 * kKvHeads * kDim};
}

// Whole numbers: middles and half widths are exact in fp32, bf16 and fp16.
TEST(MinMaxEncoder, ChoosesAsTheDefinitionOnTheHostAndOnADevice) {
  for (const int64_t group_tokens : {2, 4, 16, 33, 64}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int64_t padding : {0, 37}) {
        const Prompt prompt = draw(group_tokens + padding, 600 * 2 + group_tokens * 3, padding);
        for (const double weight : {1.0, 0.5, 0.0}) {
          const auto expected = expected_choice(prompt, group_tokens, 6, weight);
          MethodOptions options = box_options(group_tokens, dtype);
          options.bound_weight = weight;
          ASSERT_EQ(choice(*make_selector(options, nullptr), prompt, group_tokens, 6), expected)
              << group_tokens << " " << static_cast<int>(dtype) << " " << padding << " " << weight;
          ASSERT_TRUE(has_device_kernels(options));
          OnDevice device({.delay_us_max = 50}, options, room_of(prompt, group_tokens, 6));
          ASSERT_EQ(choice(device.selector(), prompt, group_tokens, 6), expected);
        }
      }
    }
  }
}

TEST(MinMaxEncoder, ADeviceChoosesAsTheHostAtEveryPrecision) {
  for (const int64_t group_tokens : {1, 4, 32}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
      Prompt prompt = draw(group_tokens, 300 * group_tokens, 2 * group_tokens + 1);
      std::mt19937_64 random(group_tokens);
      std::normal_distribution<float> normal;
      for (float& key : prompt.keys) key = normal(random);
      const MethodOptions options = box_options(group_tokens, dtype);
      const auto on_host = choice(*make_selector(options, nullptr), prompt, group_tokens, 20);
      OnDevice device({.delay_us_max = 50}, options, room_of(prompt, group_tokens, 20));
      EXPECT_EQ(choice(device.selector(), prompt, group_tokens, 20), on_host)
          << group_tokens << " " << static_cast<int>(dtype);
    }
  }
}

TEST(MinMaxEncoder, ABoxWiderThanTheKernelsTakeIsTheHosts) {
  MethodOptions options = box_options(16, DType::kBFloat16);
  options.head_dim = 128;
  options.kv_heads = 4;
  EXPECT_TRUE(has_device_kernels(options));
  options.kv_heads = 8;
  EXPECT_FALSE(has_device_kernels(options)) << "2048 numbers";
  options.rows = "mean";
  EXPECT_TRUE(has_device_kernels(options));
}

TEST(MinMaxEncoder, MoreColumnsThanTheKernelsTakeAreTheHosts) {
  MethodOptions options = box_options(16, DType::kBFloat16);
  options.rows = "low_rank";
  options.ranks = {8, 1024};
  EXPECT_TRUE(has_device_kernels(options));
  options.ranks = {8, 1025};
  EXPECT_FALSE(has_device_kernels(options));
}

TEST(MinMaxEncoder, TheScoreIsABoundAtEveryPrecision) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  const int64_t tokens = 48;
  std::vector<float> keys(kKvHeads * tokens * kDim);
  for (float& key : keys) key = normal(random) * 3 + 1;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
    const MethodOptions options = box_options(16, dtype);
    const auto rows = SummaryKind::find("box")->make(options, nullptr);
    const int64_t width = rows->shape(0).width;
    std::vector<std::byte> stored(16 * width * dtype_bytes(dtype));
    std::vector<float> scales(16);
    rows->write(0, {.keys = {keys.data(), tokens * kDim, kDim},
                    .tokens = tokens,
                    .rows = stored.data(),
                    .row_scale = dtype == DType::kInt8 ? scales.data() : nullptr});
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<float> query(kHeads * kDim);
      for (float& value : query) value = normal(random);
      std::vector<float> asked(width);
      rows->ask(0, {.data = query.data(), .head_stride = kDim, .heads = kHeads, .queries = 1}, 1,
                asked.data());
      std::vector<float> scores(16);
      low_rank_score({.summary = stored.data(),
                      .token_scale = dtype == DType::kInt8 ? scales.data() : nullptr,
                      .query = asked.data(),
                      .scores = scores.data(),
                      .score_stride = 16,
                      .blocks = 1,
                      .rank = width,
                      .queries = 1,
                      .dtype = dtype});
      for (int64_t token = 0; token < tokens; ++token) {
        double product = 0;
        for (int64_t head = 0; head < kHeads; ++head) {
          for (int64_t d = 0; d < kDim; ++d) {
            product +=
                double{query[head * kDim + d]} * keys[(head / 2 * tokens + token) * kDim + d];
          }
        }
        ASSERT_GE(scores[token / 16], product - 1e-3) << static_cast<int>(dtype);
      }
    }
  }
}

TEST(MinMaxEncoder, AKeyThatIsNoFiniteNumberIsChosenFirst) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
      Prompt prompt = draw(5, 96, 0);
      prompt.keys[(1 * 96 + 50) * kDim + 3] = bad;
      const MethodOptions options = box_options(4, dtype);
      EXPECT_EQ(choice(*make_selector(options, nullptr), prompt, 4, 1), std::vector<int32_t>{12})
          << bad << " " << static_cast<int>(dtype);
    }
  }
}

TEST(MinMaxEncoder, WhatOtherRowsTakeIsRefusedByName) {
  MethodOptions options = box_options(4, DType::kFloat32);
  EXPECT_TRUE(check_method(options).is_ok());
  options.ranks = {8};
  EXPECT_NE(check_method(options).message().find("summary.rank"), std::string::npos);
  options = box_options(4, DType::kFloat32);
  options.score = Score::kMass;
  EXPECT_NE(check_method(options).message().find("score"), std::string::npos);
  options = box_options(4, DType::kFloat32);
  options.rows = "pq";
  EXPECT_NE(check_method(options).message().find("'pq'"), std::string::npos);
  const std::vector<float> ones(kKvHeads * kDim, 1.0f);
  const auto selector = make_selector(box_options(4, DType::kFloat32), nullptr);
  EXPECT_EQ(selector->set_projection(0, 1, ones.data(), ones.data()).code(), StatusCode::kInvalid);
}

}  // namespace
}  // namespace kvswap
