#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {

struct SelectShape {
  int64_t batch, tokens, rank, queries, chunk_tokens;
};

/// Summaries in chunks that stand anywhere.
template <typename T>
struct SummaryCase {
  explicit SummaryCase(const SelectShape& s)
      : shape(s),
        chunks_max((s.tokens + s.chunk_tokens - 1) / s.chunk_tokens),
        rows(random_elements<T>(s.batch * chunks_max * s.chunk_tokens * s.rank, 7)),
        scales(random_elements<float>(s.batch * chunks_max * s.chunk_tokens, 8)),
        query(random_elements<float>(s.batch * s.queries * s.rank, 9)),
        chunks(s.batch * chunks_max),
        scale_chunks(s.batch * chunks_max) {
    for (int64_t i = 0; i < chunks.size(); ++i) {
      const int64_t place = chunks.size() - 1 - i;
      chunks[i] = rows.data() + place * s.chunk_tokens * s.rank;
      scale_chunks[i] = scales.data() + place * s.chunk_tokens;
    }
  }

  cuda::SummaryTable table() {
    return {.chunks = chunks.data(),
            .scales = kIsInt8 ? scale_chunks.data() : nullptr,
            .chunks_max = chunks_max,
            .chunk_tokens = shape.chunk_tokens,
            .rank = shape.rank,
            .dtype = dtype_of<T>()};
  }

  /// [batch, queries, tokens], by the CPU's kernel.
  std::vector<float> expected() {
    std::vector<float> scores(shape.batch * shape.queries * shape.tokens);
    for (int64_t i = 0; i < chunks.size(); ++i) {
      const int64_t b = i / chunks_max;
      const int64_t first = i % chunks_max * shape.chunk_tokens;
      low_rank_score({.summary = chunks[i],
                      .token_scale = kIsInt8 ? scale_chunks[i] : nullptr,
                      .query = query.data() + b * shape.queries * shape.rank,
                      .scores = scores.data() + b * shape.queries * shape.tokens + first,
                      .score_stride = shape.tokens,
                      .blocks = std::min(shape.chunk_tokens, shape.tokens - first) / 16,
                      .rank = shape.rank,
                      .queries = shape.queries,
                      .dtype = dtype_of<T>()});
    }
    return scores;
  }

  std::vector<float> on_device() {
    GuardedBuffer<float> scores(shape.batch * shape.queries * shape.tokens);
    expect_ok(cuda::low_rank_score({.summary = table(),
                                    .query = query.data(),
                                    .scores = scores.data(),
                                    .batch = shape.batch,
                                    .queries = shape.queries,
                                    .tokens = shape.tokens},
                                   nullptr));
    return scores.copy();
  }

  static constexpr bool kIsInt8 = std::is_same_v<T, int8_t>;
  SelectShape shape;
  int64_t chunks_max;
  GuardedBuffer<T> rows;
  GuardedBuffer<float> scales, query;
  GuardedBuffer<const void*> chunks;
  GuardedBuffer<const float*> scale_chunks;
};

/// Which tokens and groups of each sequence count.
struct Restrictions {
  explicit Restrictions(const SelectShape& s)
      : words((s.tokens + 63) / 64 + 1),
        first(s.batch),
        last(s.batch),
        excluded(s.batch * 2),
        valid(s.batch * words) {
    std::mt19937_64 generator(3);
    for (int64_t i = 0; i < valid.size(); ++i) valid[i] = i % 3 == 1 ? 0 : generator();
    for (int64_t b = 0; b < s.batch; ++b) {
      first[b] = b * 5;
      last[b] = b == 2 ? 0 : s.tokens - b * 21;
      excluded[2 * b] = static_cast<int32_t>(b);
      excluded[2 * b + 1] = b % 2 ? 3 : -1;
    }
  }
  bool counts(int64_t b, int64_t token) {
    return token >= first[b] && token < last[b] &&
           (valid[b * words + token / 64] >> (token % 64) & 1);
  }

  int64_t words;
  GuardedBuffer<int64_t> first, last;
  GuardedBuffer<int32_t> excluded;
  GuardedBuffer<uint64_t> valid;
};

}  // namespace kvswap
