#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/kernel_test.h"
#include "kernels/paged_attention.h"

namespace kvswap {

struct AttentionShape {
  int64_t batch = 1, kv_heads = 1, ratio = 1, queries = 1;
  int64_t group_tokens = 4, head_dim = 64, pages = 3;
  bool table_per_head = false;
  float softcap = 0.0f;
  bool has_sinks = false;
  int64_t value_dim = 0;  // 0: as head_dim
};

/// Random pages, tables with holes, and the softmax over them in double.
template <typename T>
struct AttentionCase {
  explicit AttentionCase(const AttentionShape& s, uint32_t seed = 1) : shape(s) {
    heads = s.kv_heads * s.ratio;
    table_heads = s.table_per_head ? s.kv_heads : 1;
    page_heads = s.table_per_head ? 1 : s.kv_heads;
    value_dim = s.value_dim == 0 ? s.head_dim : s.value_dim;
    page_elements = page_heads * s.group_tokens * (s.head_dim + value_dim);
    const int64_t rows = s.batch * table_heads;
    elements = random_elements<T>((rows * s.pages + 1) * page_elements, seed);
    query = random_elements<T>(s.batch * heads * s.queries * s.head_dim + 1, seed + 1);
    std::mt19937_64 generator(seed);
    for (int64_t i = 0; i < rows * s.pages; ++i) {
      const bool hole = i % 7 == 5;
      pages.push_back(hole ? nullptr : &elements[i * page_elements]);
      masks.push_back(hole ? 0 : generator());
      positions.push_back(static_cast<int32_t>(i % s.pages * s.group_tokens));
    }
    for (int64_t row = 0; row < rows; ++row) {
      page_counts.push_back(static_cast<int32_t>(std::max<int64_t>(0, s.pages - row % 3)));
    }
    const int64_t last_position = s.pages * s.group_tokens - 1;
    for (int64_t b = 0; b < s.batch; ++b) {
      query_positions.push_back(static_cast<int32_t>(last_position - s.queries / 2));
    }
    for (int64_t head = 0; s.has_sinks && head < heads; ++head) {
      sinks.push_back(static_cast<float>(head % 3) * 2.0f - 1.0f);
    }
    output.resize(s.batch * s.queries * heads * value_dim, from_float<T>(-7.0f));
    log_sum_exp.resize(s.batch * heads * s.queries, -7.0f);
  }

  PagedAttentionArgs args() {
    const RecordShape record = {.kv_heads = page_heads,
                                .group_tokens = shape.group_tokens,
                                .head_dim = shape.head_dim,
                                .element_bytes = sizeof(T),
                                .value_dim = shape.value_dim};
    PagedAttentionArgs a;
    a.query = query.data();
    a.query_batch_stride = heads * shape.queries * shape.head_dim;
    a.query_head_stride = shape.head_dim;  // [batch, queries, heads, head_dim]
    a.query_token_stride = heads * shape.head_dim;
    a.output = output.data();
    a.log_sum_exp = log_sum_exp.data();
    a.pages = pages.data();
    a.masks = masks.data();
    a.positions = positions.data();
    a.page_counts = page_counts.data();
    a.query_positions = query_positions.data();
    a.pages_max = shape.pages;
    a.table_heads = table_heads;
    a.batch = shape.batch;
    a.heads = heads;
    a.queries = shape.queries;
    a.scale = 0.2f;
    a.softcap = shape.softcap;
    a.sinks = sinks.empty() ? nullptr : sinks.data();
    a.shape = record;
    a.dtype = dtype_of<T>();
    return a;
  }

  /// Calls visit(score, value row) for every token that (b, head, query) sees.
  template <typename Visit>
  void for_each_seen(int64_t b, int64_t head, int64_t q, const Visit& visit) const {
    const int64_t kv_head = head / shape.ratio;
    const int64_t table = b * table_heads + (shape.table_per_head ? kv_head : 0);
    const int64_t side = shape.group_tokens * shape.head_dim;
    const int64_t head_elements = shape.group_tokens * (shape.head_dim + value_dim);
    const T* row = &query[((b * shape.queries + q) * heads + head) * shape.head_dim];
    for (int64_t p = 0; p < page_counts[table]; ++p) {
      const int64_t i = table * shape.pages + p;
      for (int64_t t = 0; t < shape.group_tokens; ++t) {
        if (!(masks[i] >> t & 1) || positions[i] + t > query_positions[b] + q) continue;
        const T* page =
            static_cast<const T*>(pages[i]) + (shape.table_per_head ? 0 : kv_head) * head_elements;
        const T* key = page + t * shape.head_dim;
        double score = 0;
        for (int64_t d = 0; d < shape.head_dim; ++d) score += to_float(row[d]) * to_float(key[d]);
        score *= double{0.2f};
        const double cap = shape.softcap;
        visit(cap > 0 ? cap * std::tanh(score / cap) : score, page + side + t * value_dim);
      }
    }
  }

  void expect_matches_reference() const {
    for (int64_t i = 0; i < shape.batch * heads * shape.queries; ++i) {
      const int64_t q = i % shape.queries;
      const int64_t head = i / shape.queries % heads;
      const int64_t b = i / shape.queries / heads;
      double total = sinks.empty() ? 0 : std::exp(double{sinks[head]});
      std::vector<double> sums(value_dim);
      for_each_seen(b, head, q, [&](double score, const T* value) {
        total += std::exp(score);
        for (int64_t d = 0; d < value_dim; ++d) sums[d] += std::exp(score) * to_float(value[d]);
      });
      if (total == 0) {
        EXPECT_EQ(log_sum_exp[i], -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(log_sum_exp[i], std::log(total), 1e-4);
      }
      const T* row = &output[((b * shape.queries + q) * heads + head) * value_dim];
      for (int64_t d = 0; d < value_dim; ++d) {
        const double expected = total == 0 ? 0 : sums[d] / total;
        ASSERT_NEAR(to_float(row[d]), expected, tolerance_of<T>() * (1 + std::abs(expected)))
            << "sequence " << b << " head " << head << " query " << q << " d " << d;
      }
    }
  }

  AttentionShape shape;
  int64_t heads, table_heads, page_heads, value_dim, page_elements;
  std::vector<T> elements, query, output;
  std::vector<const void*> pages;
  std::vector<uint64_t> masks;
  std::vector<int32_t> positions, page_counts, query_positions;
  std::vector<float> log_sum_exp, sinks;
};

}  // namespace kvswap
