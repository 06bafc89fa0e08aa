// Rows of groups against their definitions, in double.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/group_rows.h"
#include "kernels/kernel_test.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 6;
constexpr int64_t kChannels = kKvHeads * kDim;
constexpr int64_t kGroups = 21;
constexpr int64_t kFirstRow = 13;
constexpr int64_t kBlocks = 3;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Keys of some groups, with a gap after each token.
template <typename K>
struct Keys {
  explicit Keys(int64_t tokens_a_group)
      : group_tokens(tokens_a_group),
        elements(random_elements<K>(kGroups * group_tokens * kStride, 3)),
        valid(kGroups, ~uint64_t{0}) {
    valid[2] = 0;
    valid[5] = 0x5555555555555555;
  }
  K& at(int64_t channel, int64_t token) {
    return elements[token * kStride + channel / kDim * kDim + channel % kDim];
  }
  /// body(key) for each that counts.
  template <typename Body>
  void each(int64_t group, int64_t channel, const Body& body) {
    for (int64_t slot = 0; slot < group_tokens; ++slot) {
      if (valid[group] >> slot & 1)
        body(double{to_float(at(channel, group * group_tokens + slot))});
    }
  }

  static constexpr int64_t kStride = kChannels + 3;
  int64_t group_tokens;
  std::vector<K> elements;
  std::vector<uint64_t> valid;
};

/// As numbers, whatever they are stored in.
struct Row {
  std::vector<double> first, second;  // [channels]
  double scale = 1;
};

template <typename K, typename S>
std::vector<Row> rows_of(Keys<K>& keys, GroupRow row) {
  const int64_t width = numbers_of(row) * kChannels;
  std::vector<S> summary(kBlocks * kSummaryBlock * width);
  std::vector<float> scales(kBlocks * kSummaryBlock, 1.0f);
  constexpr bool kIsInt8 = std::is_same_v<S, int8_t>;
  summarize_groups({.keys = keys.elements.data(),
                    .head_stride = kDim,
                    .token_stride = Keys<K>::kStride,
                    .valid = keys.valid.data(),
                    .summary = summary.data(),
                    .row_scale = kIsInt8 ? scales.data() : nullptr,
                    .first_row = kFirstRow,
                    .groups = kGroups,
                    .group_tokens = keys.group_tokens,
                    .kv_heads = kKvHeads,
                    .head_dim = kDim,
                    .row = row,
                    .key_dtype = dtype_of<K>(),
                    .summary_dtype = dtype_of<S>()});
  std::vector<Row> rows(kGroups);
  for (int64_t group = 0; group < kGroups; ++group) {
    const int64_t at = kFirstRow + group;
    rows[group].scale = scales[at];
    for (int64_t c = 0; c < width; ++c) {
      const S element =
          summary[(at / kSummaryBlock * width + c) * kSummaryBlock + at % kSummaryBlock];
      (c < kChannels ? rows[group].first : rows[group].second)
          .push_back(double{to_float(element)} * rows[group].scale);
    }
  }
  for (int64_t at = 0; at < kFirstRow; ++at) {
    EXPECT_EQ(to_float(summary[at]), 0.0f) << "a row before the first";
  }
  return rows;
}

template <typename S>
double step_of(const Row& row) {
  return std::is_same_v<S, int8_t> ? row.scale : 0;
}

template <typename K, typename S>
void expect_rows(int64_t group_tokens) {
  Keys<K> keys(group_tokens);
  const std::vector<Row> boxes = rows_of<K, S>(keys, GroupRow::kBox);
  const std::vector<Row> means = rows_of<K, S>(keys, GroupRow::kMean);
  const double tolerance = 2 * tolerance_of<S>();
  for (int64_t group = 0; group < kGroups; ++group) {
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      double low = kInfinity, high = -kInfinity, sum = 0, count = 0;
      const double middle = boxes[group].first[channel], half = boxes[group].second[channel];
      keys.each(group, channel, [&](double key) {
        low = std::min(low, key);
        high = std::max(high, key);
        sum += key;
        ++count;
        const double rounding = 1e-6 * (1 + std::abs(key));
        ASSERT_LE(std::abs(key - middle), half + rounding) << "the box holds its keys";
      });
      const double step = step_of<S>(boxes[group]);
      if (count == 0) low = high = 0;
      EXPECT_NEAR(middle, (low + high) / 2, 0.51 * step + tolerance * (1 + std::abs(low + high)));
      EXPECT_NEAR(half, (high - low) / 2, 1.51 * step + 2 * tolerance * (1 + std::abs(high - low)));
      EXPECT_NEAR(means[group].first[channel], count == 0 ? 0 : sum / count,
                  0.51 * step_of<S>(means[group]) + tolerance * (1 + std::abs(sum)));
    }
  }
}

class GroupEncoder : public KernelTest {};

TEST_P(GroupEncoder, MatchTheirDefinitions) {
  for (const int64_t group_tokens : {1, 3, 16, 64}) {
    expect_rows<float, float>(group_tokens);
    expect_rows<BFloat16, BFloat16>(group_tokens);
    expect_rows<Float16, Float16>(group_tokens);
    expect_rows<BFloat16, int8_t>(group_tokens);
  }
}

template <typename S>
void expect_no_numbers(float bad) {
  Keys<float> keys(4);
  keys.at(7, 4 * 9 + 1) = bad;
  keys.at(3, 4 * 5 + 1) = bad;  // of group 5 every other token does not count
  const std::vector<Row> boxes = rows_of<float, S>(keys, GroupRow::kBox);
  const std::vector<Row> means = rows_of<float, S>(keys, GroupRow::kMean);
  for (int64_t group = 0; group < kGroups; ++group) {
    double product = 0;
    for (const double mean : means[group].first) product += mean;
    EXPECT_EQ(std::isnan(product), group == 9) << group;
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      const double half = boxes[group].second[channel];
      EXPECT_TRUE(std::isfinite(half) && half >= 0);
      EXPECT_EQ(half > 6e4, group == 9) << "the largest box";
      if (group == 9) {
        EXPECT_EQ(boxes[group].first[channel], 0.0);
      }
    }
  }
}

TEST_P(GroupEncoder, AKeyThatIsNotFiniteMakesTheLargestBoxAndNoMean) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinite, -kInfinite}) {
    expect_no_numbers<float>(bad);
    expect_no_numbers<BFloat16>(bad);
    expect_no_numbers<Float16>(bad);
    expect_no_numbers<int8_t>(bad);
  }
}

TEST_P(GroupEncoder, AreAskedWithTheHeadsThatAsk) {
  constexpr int64_t kHeads = 6;
  const auto query = random_elements<BFloat16>(kHeads * (kDim + 2), 4);
  for (const GroupRow row : {GroupRow::kBox, GroupRow::kMean}) {
    for (const int64_t first : {0, 2}) {
      std::vector<float> asked(numbers_of(row) * kChannels + 1, 7.0f);
      ask_groups({.query = query.data(),
                  .head_stride = kDim + 2,
                  .asked = asked.data(),
                  .heads = kHeads,
                  .first_head = first,
                  .last_head = first == 0 ? kHeads : first + 1,
                  .kv_heads = kKvHeads,
                  .head_dim = kDim,
                  .row = row,
                  .scale = 0.5f,
                  .weight = 0.25f,
                  .dtype = DType::kBFloat16});
      EXPECT_EQ(asked.back(), 7.0f) << "written past the end";
      for (int64_t channel = 0; channel < kChannels; ++channel) {
        double sum = 0, size = 0;
        for (int64_t head = first; head < (first == 0 ? kHeads : first + 1); ++head) {
          if (head / 3 != channel / kDim) continue;
          const double q = to_float(query[head * (kDim + 2) + channel % kDim]);
          sum += 0.5 * q;
          size += 0.5 * std::abs(q);
        }
        EXPECT_NEAR(asked[channel], sum, 1e-5);
        if (row == GroupRow::kBox) {
          EXPECT_NEAR(asked[kChannels + channel], 0.25 * size, 1e-5);
        }
      }
    }
  }
}

KVSWAP_EVERY_LEVEL(GroupEncoder);

}  // namespace
}  // namespace kvswap
