// Scores by mass of random numbers against softmaxes in double, over summaries of several chunks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "kernels/cpu/element.h"
#include "methods/selection/attention_mass_scorer.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {
namespace {

struct Case {
  int64_t heads = 6;
  int64_t rank = 5;
  int64_t groups = 700;
  int64_t group_tokens = 4;
  int64_t padding = 0;
  int64_t hole = 0;
  std::vector<int32_t> excluded = {0, 2};
  HeadJoin join = HeadJoin::kSum;
  DType dtype = DType::kFloat32;
};

class Scored {
 public:
  explicit Scored(const Case& of)
      : case_(of),
        summary_({of.rank, chunk_rows(of.group_tokens, 1), of.dtype}, make_host_summary_memory()) {
    const int64_t tokens = of.groups * of.group_tokens;
    rows_ = numbers(tokens * of.rank);
    queries_ = numbers(of.heads * of.rank);
    if (has_row_scales(of.dtype)) round_all(queries_, of.rank, 127);
    if (has_row_scales(of.dtype)) round_all(rows_, of.rank, levels());
    const Status appended =
        summary_.append(tokens, [&](auto& chunk, int64_t row, int64_t token, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            if (!chunk.token_scale.empty()) chunk.token_scale[row + i] = scale_of(token + i);
            for (int64_t r = 0; r < of.rank; ++r) {
              const int64_t columns = of.dtype == DType::kInt4 ? (of.rank + 1) / 2 : of.rank;
              const int64_t column = of.dtype == DType::kInt4 ? r / 2 : r;
              const int64_t at = ((row + i) / 16 * columns + column) * 16 + (row + i) % 16;
              store(chunk.rows.data(), at, token + i, r);
            }
          }
        });
    EXPECT_TRUE(appended.is_ok());
    const auto none = std::make_unique<bool[]>(of.padding + of.hole + 1);
    valid_.append(of.padding, none.get());
    valid_.append((tokens - of.padding - of.hole) / 2, nullptr);
    valid_.append(of.hole, none.get());
    valid_.append(tokens - valid_.positions(), nullptr);
  }

  std::vector<float> scores(const ParallelFor* parallel = nullptr) {
    const Candidates candidates = {&valid_, case_.excluded};
    std::vector<float> scores(case_.groups);
    scorer_.score({.summary = &summary_,
                   .query = queries_.data(),
                   .candidates = &candidates,
                   .heads = case_.heads,
                   .groups = case_.groups,
                   .join = case_.join,
                   .parallel = parallel},
                  case_.group_tokens, scores.data());
    return scores;
  }

  void expect_reference() {
    const std::vector<float> own = scores();
    std::vector<double> expected(case_.groups, 0.0);
    for (int64_t h = 0; h < case_.heads; ++h) {
      double total = 0;
      for (int64_t t = 0; t < case_.groups * case_.group_tokens; ++t) total += weight(h, t);
      for (int64_t g = 0; g < case_.groups; ++g) {
        double mass = 0;
        for (int64_t i = 0; i < case_.group_tokens; ++i) {
          if (total > 0) mass += weight(h, g * case_.group_tokens + i) / total;
        }
        expected[g] =
            case_.join == HeadJoin::kSum ? expected[g] + mass : std::max(expected[g], mass);
      }
    }
    for (int64_t g = 0; g < case_.groups; ++g) {
      if (expected[g] == 0) {
        ASSERT_EQ(own[g], -INFINITY) << g;
      } else {
        ASSERT_NEAR(own[g], expected[g], 1e-8 + 1e-4 * expected[g]) << g;
      }
    }
  }

 private:
  float levels() const { return case_.dtype == DType::kInt4 ? 7 : 127; }
  /// To what an int8 or int4 row or an int8 query holds.
  static void round_all(std::vector<float>& values, int64_t rank, float levels) {
    for (size_t first = 0; first < values.size(); first += rank) {
      float limit = 0;
      for (int64_t r = 0; r < rank; ++r) limit = std::max(limit, std::abs(values[first + r]));
      const float scale = limit / levels;
      for (int64_t r = 0; r < rank; ++r) {
        values[first + r] = std::nearbyint(values[first + r] / scale) * scale;
      }
    }
  }
  float scale_of(int64_t token) const {
    float limit = 0;
    for (int64_t r = 0; r < case_.rank; ++r) {
      limit = std::max(limit, std::abs(rows_[token * case_.rank + r]));
    }
    return limit / levels();
  }
  void store(std::byte* target, int64_t at, int64_t token, int64_t column) {
    float& value = rows_[token * case_.rank + column];
    if (case_.dtype == DType::kInt8) {
      const float level = std::nearbyint(value / scale_of(token));
      reinterpret_cast<int8_t*>(target)[at] = static_cast<int8_t>(level);
    } else if (case_.dtype == DType::kInt4) {
      auto& byte = reinterpret_cast<uint8_t*>(target)[at];
      const int level = static_cast<int>(std::nearbyint(value / scale_of(token))) & 15;
      byte = static_cast<uint8_t>(column % 2 == 0 ? level : (byte & 15) | level << 4);
    } else if (case_.dtype == DType::kBFloat16) {
      const auto rounded = from_float<BFloat16>(value);
      reinterpret_cast<BFloat16*>(target)[at] = rounded;
      value = to_float(rounded);
    } else {
      reinterpret_cast<float*>(target)[at] = value;
    }
  }
  std::vector<float> numbers(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = 2 * normal(random_);
    return values;
  }

  double weight(int64_t head, int64_t token) const {
    const auto group = static_cast<int32_t>(token / case_.group_tokens);
    const auto& excluded = case_.excluded;
    if (!valid_.is_valid(token)) return 0;
    if (std::find(excluded.begin(), excluded.end(), group) != excluded.end()) return 0;
    double product = 0;
    for (int64_t r = 0; r < case_.rank; ++r) {
      product += double{rows_[token * case_.rank + r]} * queries_[head * case_.rank + r];
    }
    return std::exp(product);
  }

  Case case_;
  std::mt19937 random_{5};
  KeySummary summary_;
  MassScorer scorer_;
  std::vector<float> rows_, queries_;
  PaddingMask valid_;
};

TEST(MassScorer, AsSoftmaxesInDouble) {
  for (const HeadJoin join : {HeadJoin::kSum, HeadJoin::kMax}) {
    for (const int64_t group_tokens : {1, 3, 4, 16, 64}) {
      Scored({.groups = 2500 / group_tokens, .group_tokens = group_tokens, .join = join})
          .expect_reference();
    }
    Scored({.heads = 1, .groups = 1, .excluded = {}, .join = join}).expect_reference();
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kInt4}) {
      Scored({.heads = 17, .rank = 32, .join = join, .dtype = dtype}).expect_reference();
      Scored({.heads = 2, .rank = 7, .group_tokens = 3, .join = join, .dtype = dtype})
          .expect_reference();
    }
    Scored({.padding = 61, .hole = 1100, .excluded = {15, 16}, .join = join}).expect_reference();
    Scored({.groups = 20, .padding = 80, .excluded = {}, .join = join}).expect_reference();
  }
}

TEST(MassScorer, TheSameBitsForAnyNumberOfThreads) {
  Scored scored({.heads = 9, .rank = 16, .groups = 2000});
  const std::vector<float> serial = scored.scores();
  for (const int64_t threads : {2, 3, 7}) {
    const ParallelFor parallel = [&](int64_t count, int64_t, const auto& body) {
      std::vector<std::thread> team;
      for (int64_t i = 0; i < threads; ++i) {
        team.emplace_back([&, i] { body(count * i / threads, count * (i + 1) / threads); });
      }
      for (std::thread& member : team) member.join();
    };
    EXPECT_EQ(scored.scores(&parallel), serial);
  }
}

}  // namespace
}  // namespace kvswap
