// Long chunks against softmax(scale * Q K^T) V in double, in each dtype at each SIMD level.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "kernels/chunk_attention.h"
#include "kernels/cpu/bf16_pairs.h"
#include "kernels/kernel_test.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Case {
  int64_t kv_heads = 2, ratio = 3, head_dim = 64;
  int64_t tokens = 300;
  int64_t queries = 40;
  int64_t group_tokens = 4;
  int64_t query_position = 300;  // all tokens are before query 0
  float softcap = 0.0f;
  bool has_padding = false;  // the first 17 tokens, and every 29th
  bool in_records = true;    // else a view [tokens, kv_heads, head_dim]
  int64_t value_dim = 0;     // 0: as head_dim
};

/// Serial pieces in turn, from the last to the first: the order must not count.
void backwards(int64_t count, int64_t /*grain*/,
               const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t i = count; i > 0; --i) body(i - 1, i);
}

template <typename T>
class Chunk {
 public:
  explicit Chunk(const Case& of)
      : heads(of.kv_heads * of.ratio),
        value_dim(of.value_dim == 0 ? of.head_dim : of.value_dim),
        output(of.queries * heads * value_dim),
        log_sum_exp(of.queries * heads, kNever),
        keys(random_elements<T>(of.tokens * of.kv_heads * of.head_dim, 1)),
        values(random_elements<T>(of.tokens * of.kv_heads * value_dim, 2)),
        query(random_elements<T>(heads * of.queries * of.head_dim, 3)),
        valid(of.tokens, 1),
        case_(of) {
    for (int64_t t = 0; of.has_padding && t < of.tokens; ++t) valid[t] = t >= 17 && t % 29 != 0;
  }

  /// Over tokens [begin, end), a group's multiple.
  void attend(int64_t begin, int64_t end, const ParallelFor* parallel = nullptr) {
    const Case& c = case_;
    const int64_t row = c.kv_heads * c.head_dim, value_row = c.kv_heads * value_dim;
    ChunkAttentionArgs args = {.query = query.data(),
                               .query_head_stride = c.queries * c.head_dim,
                               .query_token_stride = c.head_dim,
                               .output = output.data(),
                               .log_sum_exp = log_sum_exp.data(),
                               .valid = c.has_padding ? valid.data() + begin : nullptr,
                               .tokens = end - begin,
                               .position = begin,
                               .query_position = c.query_position,
                               .heads = heads,
                               .queries = c.queries,
                               .scale = scale(),
                               .softcap = c.softcap,
                               .shape = {.kv_heads = c.kv_heads,
                                         .group_tokens = c.group_tokens,
                                         .head_dim = c.head_dim,
                                         .element_bytes = sizeof(T),
                                         .value_dim = c.value_dim},
                               .dtype = dtype_of<T>()};
    pack();
    if (c.in_records) {
      args.records = records_.data() + begin / c.group_tokens;
    } else {
      args.view = {.keys = keys.data() + begin * row,
                   .values = values.data() + begin * value_row,
                   .key_head_stride = c.head_dim,
                   .key_token_stride = row,
                   .value_head_stride = value_dim,
                   .value_token_stride = value_row};
    }
    chunk_attention(args, {.parallel = parallel});
  }

  /// Every number against the definition.
  void expect_exact() const {
    const Case& c = case_;
    for (int64_t q = 0; q < c.queries; ++q) {
      for (int64_t head = 0; head < heads; ++head) expect_row(q, head);
    }
  }

  T& key(int64_t t, int64_t kv_head, int64_t d) { return keys[at(t, kv_head, d)]; }
  T& value(int64_t t, int64_t kv_head, int64_t d) { return values[value_at(t, kv_head, d)]; }

  int64_t heads, value_dim;
  std::vector<float> output, log_sum_exp;
  std::vector<T> keys, values;  // [tokens, kv_heads, head_dim or value_dim]
  std::vector<T> query;         // [heads, queries, head_dim]
  std::vector<uint8_t> valid;

 private:
  int64_t at(int64_t t, int64_t kv_head, int64_t d) const {
    return (t * case_.kv_heads + kv_head) * case_.head_dim + d;
  }
  int64_t value_at(int64_t t, int64_t kv_head, int64_t d) const {
    return (t * case_.kv_heads + kv_head) * value_dim + d;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.head_dim)); }

  /// `rounded` where weights are rounded to bf16.
  static double tolerance(double rounded) {
    return std::is_same_v<T, BFloat16> && has_bf16_pairs() ? rounded : 2e-5;
  }

  void pack() {
    const Case& c = case_;
    const int64_t groups = (c.tokens + c.group_tokens - 1) / c.group_tokens;
    const int64_t of_head = c.group_tokens * (c.head_dim + value_dim);
    const int64_t record = c.kv_heads * of_head;
    packed_.assign(groups * record, from_float<T>(NAN));  // what is not there must not count
    records_.resize(groups);
    for (int64_t i = 0; i < groups; ++i) records_[i] = packed_.data() + i * record;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        const int64_t slot = t % c.group_tokens;
        T* to = packed_.data() + t / c.group_tokens * record + h * of_head;
        std::copy_n(&keys[at(t, h, 0)], c.head_dim, to + slot * c.head_dim);
        std::copy_n(&values[value_at(t, h, 0)], value_dim,
                    to + c.group_tokens * c.head_dim + slot * value_dim);
      }
    }
  }

  void expect_row(int64_t q, int64_t head) const {
    const Case& c = case_;
    std::vector<double> weights;
    double sum = 0;
    for (int64_t t = 0; t < c.tokens; ++t) {
      double score = 0;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        score += double{to_float(query[(head * c.queries + q) * c.head_dim + d])} *
                 to_float(keys[at(t, head / c.ratio, d)]);
      }
      score *= scale();
      if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
      const bool is_seen = valid[t] != 0 && t <= c.query_position + q;
      weights.push_back(is_seen ? std::exp(score) : 0);
      sum += weights.back();
    }
    const int64_t row = q * heads + head;
    if (sum == 0) {
      EXPECT_EQ(log_sum_exp[row], kNever) << "query " << q << ", head " << head;
    } else {
      EXPECT_NEAR(log_sum_exp[row], std::log(sum), tolerance(1e-4))
          << "query " << q << ", head " << head;
    }
    for (int64_t d = 0; d < value_dim; ++d) {
      double expected = 0;
      for (int64_t t = 0; t < c.tokens && sum > 0; ++t) {
        if (weights[t] == 0) continue;
        expected += weights[t] / sum * to_float(values[value_at(t, head / c.ratio, d)]);
      }
      ASSERT_NEAR(output[row * value_dim + d], expected, tolerance(6e-3))
          << "query " << q << ", head " << head << ", number " << d;
    }
  }

  Case case_;
  std::vector<T> packed_;
  std::vector<const void*> records_;
};

class ChunkAttention : public KernelTest {};
KVSWAP_EVERY_LEVEL(ChunkAttention);

/// body<T>() for each type of elements.
template <typename Body>
void for_each_type(const Body& body) {
  const auto named = [&]<typename T>(const char* name) {
    SCOPED_TRACE(name);
    body.template operator()<T>();
  };
  named.template operator()<float>("fp32");
  named.template operator()<BFloat16>("bf16");
  named.template operator()<Float16>("fp16");
}

const Case kShapes[] = {{},
                        {.tokens = 1},
                        {.queries = 1},
                        {.kv_heads = 1, .ratio = 1},
                        {.kv_heads = 3, .ratio = 8, .queries = 7},
                        {.head_dim = 1},
                        {.head_dim = 7},
                        {.head_dim = 80},
                        {.head_dim = 128},
                        {.head_dim = 256, .tokens = 70, .queries = 9},
                        {.head_dim = 512, .tokens = 150, .queries = 5},
                        {.head_dim = 192, .value_dim = 128},
                        {.head_dim = 72, .has_padding = true, .value_dim = 40},
                        {.head_dim = 33, .in_records = false, .value_dim = 7},
                        {.group_tokens = 1},
                        {.group_tokens = 64},
                        {.in_records = false},
                        {.head_dim = 33, .in_records = false},
                        {.has_padding = true},
                        {.softcap = 3.0f},
                        {.softcap = 30.0f, .has_padding = true},
                        {.tokens = 40, .query_position = 0, .in_records = false},
                        {.tokens = 600, .queries = 300, .query_position = 300},
                        {.tokens = 300, .queries = 300, .query_position = 0},
                        {.tokens = 60, .queries = 60, .query_position = 0, .has_padding = true}};

TEST_P(ChunkAttention, EveryShapeIsExact) {
  for_each_type([]<typename T>() {
    for (const Case& shape : kShapes) {
      SCOPED_TRACE(&shape - kShapes);
      Chunk<T> chunk(shape);
      chunk.attend(0, shape.tokens);
      chunk.expect_exact();
    }
  });
}

TEST_P(ChunkAttention, BlocksAfterBlocksComeToTheSameAsAllAtOnce) {
  for_each_type([]<typename T>() {
    Chunk<T> chunk({.tokens = 1000, .query_position = 1000});
    for (int64_t begin = 0; begin < 1000; begin += 100) chunk.attend(begin, begin + 100);
    chunk.expect_exact();
  });
}

TEST_P(ChunkAttention, HowTheWorkIsSplitChangesNoBit) {
  for_each_type([]<typename T>() {
    const Case many = {.kv_heads = 1, .tokens = 520, .queries = 700, .query_position = 100};
    Chunk<T> serial(many);
    Chunk<T> split(many);
    const ParallelFor parallel = backwards;
    serial.attend(0, 520);
    split.attend(0, 520, &parallel);
    EXPECT_EQ(serial.output, split.output);
    EXPECT_EQ(serial.log_sum_exp, split.log_sum_exp);
  });
}

TEST_P(ChunkAttention, WhoSeesNothingKeepsWhatItHas) {
  for_each_type([]<typename T>() {
    Chunk<T> chunk({.has_padding = true});
    chunk.attend(0, 300);
    const Chunk<T> before = chunk;
    std::fill(chunk.valid.begin(), chunk.valid.end(), 0);
    chunk.attend(0, 300);
    EXPECT_EQ(chunk.output, before.output);
    EXPECT_EQ(chunk.log_sum_exp, before.log_sum_exp);
  });
}

TEST_P(ChunkAttention, PaddingThatIsNoNumberTouchesNothing) {
  for_each_type([]<typename T>() {
    Chunk<T> chunk({.has_padding = true});
    for (int64_t d = 0; d < 64; ++d) {
      chunk.key(3, 0, d) = chunk.value(3, 0, d) = from_float<T>(NAN);
      chunk.key(29, 1, d) = chunk.value(29, 1, d) = from_float<T>(INFINITY);
    }
    chunk.attend(0, 300);
    chunk.expect_exact();
  });
}

/// Unless its score is -inf, which weighs nothing.
template <typename T>
void expect_nan_of_its_heads_alone(T number, bool is_never_chosen, float softcap = 0.0f) {
  Chunk<T> chunk({.kv_heads = 2, .ratio = 1, .queries = 2, .softcap = softcap});
  chunk.key(250, 1, 5) = number;
  chunk.query[(1 * 2 + 0) * 64 + 5] = from_float<T>(1.0f);
  chunk.query[(1 * 2 + 1) * 64 + 5] = from_float<T>(1.0f);
  chunk.attend(0, 300);
  for (int64_t q = 0; q < 2; ++q) {
    EXPECT_FALSE(std::isnan(chunk.output[(q * 2 + 0) * 64]));
    EXPECT_EQ(std::isnan(chunk.output[(q * 2 + 1) * 64]), !is_never_chosen);
  }
}

TEST_P(ChunkAttention, AKeyThatIsNoNumberOrInfiniteGivesNaNToItsHeadsAlone) {
  for (const uint16_t bits : {0x7fc0, 0xffc1, 0x7fff, 0x7f80, 0xff80}) {
    SCOPED_TRACE(bits);
    expect_nan_of_its_heads_alone(BFloat16{bits}, bits == 0xff80);
  }
  for_each_type([]<typename T>() {
    expect_nan_of_its_heads_alone(from_float<T>(NAN), false);
    expect_nan_of_its_heads_alone(from_float<T>(INFINITY), false);
    expect_nan_of_its_heads_alone(from_float<T>(-INFINITY), true);
    expect_nan_of_its_heads_alone(from_float<T>(NAN), false, 5.0f);
  });
}

TEST_P(ChunkAttention, LargeScoresDoNotOverflow) {
  for_each_type([]<typename T>() {
    Chunk<T> chunk({.tokens = 64, .queries = 2, .query_position = 64});
    for (T& key : chunk.keys) key = from_float<T>(to_float(key) * 200.0f);
    chunk.attend(0, 64);
    for (const float number : chunk.output) EXPECT_TRUE(std::isfinite(number));
    for (const float number : chunk.log_sum_exp) EXPECT_TRUE(std::isfinite(number));
  });
}

TEST_P(ChunkAttention, TheLargestNumbersOfFp16AreNotTooLarge) {
  for_each_type([]<typename T>() {
    Chunk<T> chunk({.kv_heads = 2, .ratio = 1});
    std::mt19937 generator(5);
    for (T& key : chunk.keys) key = from_float<T>(generator() % 2 == 0 ? 6e4f : -6e4f);
    for (int64_t q = 0; q < 40; ++q) {
      for (int64_t d = 0; d < 64; ++d) {
        for (int64_t head = 0; head < 2; ++head) {
          chunk.query[(head * 40 + q) * 64 + d] = chunk.key(7 * q, head, d);
        }
      }
    }
    chunk.attend(0, 100);
    chunk.attend(100, 300);
    for (int64_t q = 0; q < 40; ++q) {  // each attends the one token that is its query
      for (int64_t d = 0; d < 64; ++d) {
        ASSERT_NEAR(chunk.output[(q * 2 + 1) * 64 + d], to_float(chunk.value(7 * q, 1, d)), 1e-5);
      }
    }
  });
}

}  // namespace
}  // namespace kvswap
