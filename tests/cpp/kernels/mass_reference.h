#pragma once

#include <cmath>
#include <vector>

#include "kernels/attention_reference.h"
#include "kernels/observe_keys.h"

namespace kvswap {

/// What mass is compared with: means over a KV head's query heads and queries, in double.
struct Mass {
  std::vector<double> mean, square;  // [batch, kv_heads, slots]

  void expect(const std::vector<float>& means, const std::vector<float>& squares) const {
    ASSERT_EQ(means.size(), mean.size());
    for (size_t i = 0; i < mean.size(); ++i) {
      ASSERT_NEAR(means[i], mean[i], 2e-5 * (0.1 + mean[i])) << i;
      ASSERT_NEAR(squares[i], square[i], 2e-5 * (0.1 + square[i])) << i;
    }
  }
};

/// Of every slot of a page table.
template <typename T>
Mass expected_mass(const AttentionCase<T>& attention) {
  const AttentionShape& s = attention.shape;
  const int64_t slots = s.pages * s.group_tokens;
  const int64_t side = s.group_tokens * s.head_dim;
  const auto rows = static_cast<double>(s.ratio * s.queries);
  Mass mass;
  mass.mean.resize(s.batch * s.kv_heads * slots);
  mass.square.resize(mass.mean.size());
  for (int64_t i = 0; i < s.batch * attention.heads * s.queries; ++i) {
    const int64_t q = i % s.queries;
    const int64_t head = i / s.queries % attention.heads;
    const int64_t b = i / s.queries / attention.heads;
    const int64_t kv_head = head / s.ratio;
    const int64_t table = b * attention.table_heads + (s.table_per_head ? kv_head : 0);
    double total = 0;
    attention.for_each_seen(b, head, q, [&](double score, const T*) { total += std::exp(score); });
    attention.for_each_seen(b, head, q, [&](double score, const T* value) {
      // Pages of a case stand one after the other, so that a value tells its slot.
      const int64_t at = value - attention.elements.data();
      const int64_t page = at / attention.page_elements - table * s.pages;
      const int64_t of_head = side + s.group_tokens * attention.value_dim;
      const int64_t token = (at % attention.page_elements % of_head - side) / attention.value_dim;
      const double weight = std::exp(score) / total;
      const int64_t place = (b * s.kv_heads + kv_head) * slots + page * s.group_tokens + token;
      mass.mean[place] += weight / rows;
      mass.square[place] += weight * weight / rows;
    });
  }
  return mass;
}

struct ChunkShape {
  int64_t batch = 2, kv_heads = 2, ratio = 2, queries = 8, tokens = 70, head_dim = 64;
  bool has_padding = false;
};

/// A chunk's keys [batch, tokens, kv_heads, head_dim] and its newest queries.
template <typename T>
struct ChunkCase {
  explicit ChunkCase(const ChunkShape& s) : shape(s), heads(s.kv_heads * s.ratio) {
    query = random_elements<T>(s.batch * s.queries * heads * s.head_dim, 3);
    keys = random_elements<T>(s.batch * s.tokens * s.kv_heads * s.head_dim, 4);
    const int64_t words = (s.tokens + 63) / 64;
    valid.assign(s.batch * words, ~uint64_t{0});
    // The first sequence is padded on the left, the second has a hole.
    if (s.has_padding) valid[0] <<= 11;
    if (s.has_padding && s.batch > 1) valid[words] &= ~uint64_t{0x3f0};
  }

  ObserveKeysArgs args() const {
    const ChunkShape& s = shape;
    return {.query = query.data(),
            .query_batch_stride = s.queries * heads * s.head_dim,
            .query_head_stride = s.head_dim,
            .query_token_stride = heads * s.head_dim,
            .keys = keys.data(),
            .key_batch_stride = s.tokens * s.kv_heads * s.head_dim,
            .key_head_stride = s.head_dim,
            .key_token_stride = s.kv_heads * s.head_dim,
            .valid = s.has_padding ? valid.data() : nullptr,
            .batch = s.batch,
            .heads = heads,
            .kv_heads = s.kv_heads,
            .queries = s.queries,
            .tokens = s.tokens,
            .head_dim = s.head_dim,
            .scale = 0.2f,
            .dtype = dtype_of<T>()};
  }

  /// past: what keys before the chunk add to each query's sum of exponentials.
  Mass expected(double past = 0) const {
    const ChunkShape& s = shape;
    const auto rows = static_cast<double>(s.ratio * s.queries);
    Mass mass;
    mass.mean.resize(s.batch * s.kv_heads * s.tokens);
    mass.square.resize(mass.mean.size());
    for (int64_t i = 0; i < s.batch * heads * s.queries; ++i) {
      const int64_t kv_head = i / s.queries % heads / s.ratio;
      const int64_t b = i / s.queries / heads;
      std::vector<double> weights(s.tokens);
      double total = past;
      for (int64_t t = 0; t <= s.tokens - s.queries + i % s.queries; ++t) {
        if (s.has_padding && !(valid[b * ((s.tokens + 63) / 64) + t / 64] >> t % 64 & 1)) continue;
        total += weights[t] = std::exp(score(i, b, kv_head, t));
      }
      for (int64_t t = 0; t < s.tokens && total > 0; ++t) {
        const double weight = weights[t] / total;
        mass.mean[(b * s.kv_heads + kv_head) * s.tokens + t] += weight / rows;
        mass.square[(b * s.kv_heads + kv_head) * s.tokens + t] += weight * weight / rows;
      }
    }
    return mass;
  }

  /// Of row i of [batch, heads, queries].
  double score(int64_t i, int64_t b, int64_t kv_head, int64_t token) const {
    const ChunkShape& s = shape;
    const int64_t head = i / s.queries % heads;
    double sum = 0;
    for (int64_t d = 0; d < s.head_dim; ++d) {
      sum += double{to_float(
                 query[((b * s.queries + i % s.queries) * heads + head) * s.head_dim + d])} *
             to_float(keys[((b * s.tokens + token) * s.kv_heads + kv_head) * s.head_dim + d]);
    }
    return sum * double{0.2f};
  }

  ChunkShape shape;
  int64_t heads;
  std::vector<T> query, keys;
  std::vector<uint64_t> valid;
};

}  // namespace kvswap
