#include <thread>

#include "kernels/attention_reference.h"
#include "kernels/paged_attention.h"

namespace kvswap {
namespace {

class PagedAttention : public KernelTest {};

template <typename T>
void expect_matches_reference(const AttentionShape& shape) {
  AttentionCase<T> attention(shape);
  paged_attention(attention.args(), {});
  attention.expect_matches_reference();
}

void expect_all_types(const AttentionShape& shape) {
  expect_matches_reference<float>(shape);
  expect_matches_reference<BFloat16>(shape);
  expect_matches_reference<Float16>(shape);
}

TEST_P(PagedAttention, HeadDimsAndRatios) {
  for (const int64_t head_dim : {64, 72, 80, 96, 128, 256}) {
    for (const int64_t ratio : {1, 2, 3, 4, 7, 16}) {
      expect_all_types({.kv_heads = 2, .ratio = ratio, .head_dim = head_dim, .pages = 20});
    }
  }
}

TEST_P(PagedAttention, ValuesNarrowerThanKeys) {
  for (const auto& [head_dim, value_dim] : {std::pair{192, 128}, {64, 1}, {72, 40}, {24, 16}}) {
    for (const int64_t queries : {1, 5}) {
      AttentionShape shape = {.batch = 2,
                              .kv_heads = 2,
                              .ratio = 3,
                              .queries = queries,
                              .group_tokens = 5,
                              .head_dim = head_dim,
                              .pages = 30,
                              .value_dim = value_dim};
      expect_all_types(shape);
      shape.table_per_head = true;
      expect_all_types(shape);
      shape.pages = 900;  // in parts
      expect_all_types(shape);
    }
  }
}

TEST_P(PagedAttention, GroupSizes) {
  for (const int64_t group_tokens : {1, 2, 4, 8, 13, 16, 32, 64}) {
    expect_all_types({.kv_heads = 2, .ratio = 2, .group_tokens = group_tokens, .pages = 11});
  }
}

TEST_P(PagedAttention, SeveralQueriesAreCausal) {
  for (const int64_t queries : {2, 3, 8, 16}) {
    expect_all_types({.batch = 2, .kv_heads = 2, .ratio = 3, .queries = queries, .pages = 9});
  }
}

TEST_P(PagedAttention, TablesPerHead) {
  expect_all_types({.batch = 3, .kv_heads = 4, .ratio = 4, .pages = 25, .table_per_head = true});
}

TEST_P(PagedAttention, BatchesWithRaggedTables) {
  expect_all_types({.batch = 8, .kv_heads = 3, .ratio = 4, .pages = 30});
}

TEST_P(PagedAttention, OneToken) {
  AttentionCase<float> attention({.group_tokens = 1, .pages = 1});
  attention.masks[0] = 1;
  paged_attention(attention.args(), {});
  attention.expect_matches_reference();
}

TEST_P(PagedAttention, EmptySelectionGivesZeros) {
  AttentionCase<BFloat16> attention({.batch = 2, .kv_heads = 2, .ratio = 4});
  std::fill(attention.masks.begin(), attention.masks.end(), 0);
  paged_attention(attention.args(), {});
  attention.expect_matches_reference();

  AttentionCase<float> no_pages({.pages = 0});
  paged_attention(no_pages.args(), {});
  no_pages.expect_matches_reference();
}

TEST_P(PagedAttention, LargeScoresDoNotOverflow) {
  AttentionCase<float> attention({.ratio = 4, .pages = 50});
  for (float& element : attention.query) element *= 100.0f;
  paged_attention(attention.args(), {});
  for (const float value : attention.output) EXPECT_TRUE(std::isfinite(value));
  for (const float value : attention.log_sum_exp) EXPECT_TRUE(std::isfinite(value));
}

TEST_P(PagedAttention, SplitPagesAreMerged) {
  expect_all_types({.batch = 1, .kv_heads = 2, .ratio = 2, .queries = 2, .pages = 1500});
}

TEST_P(PagedAttention, CappedScoresAndSinks) {
  for (const int64_t pages : {3, 520}) {
    for (const float softcap : {0.0f, 0.7f}) {
      expect_all_types({.batch = 2,
                        .kv_heads = 2,
                        .ratio = 4,
                        .queries = 3,
                        .pages = pages,
                        .softcap = softcap,
                        .has_sinks = true});
    }
  }
  expect_all_types({.kv_heads = 2, .ratio = 4, .pages = 20, .softcap = 2.0f});
}

TEST_P(PagedAttention, SinksTakeAllWeightWhereNothingIsSeen) {
  AttentionCase<float> attention({.batch = 2, .kv_heads = 2, .ratio = 4, .has_sinks = true});
  std::fill(attention.masks.begin(), attention.masks.end(), 0);
  paged_attention(attention.args(), {});
  attention.expect_matches_reference();
}

template <typename T>
void expect_seen(float bad, int64_t pages, float softcap) {
  AttentionCase<T> attention({.kv_heads = 2, .ratio = 2, .pages = pages, .softcap = softcap});
  attention.masks[pages - 2] = 0b11;
  const auto* page = static_cast<const T*>(attention.pages[pages - 2]);
  const_cast<T*>(page)[64 + 5] = from_float<T>(bad);  // K of the first KV head, token 1
  for (int64_t head = 0; head < 2; ++head) attention.query[head * 64 + 5] = from_float<T>(0.5f);
  paged_attention(attention.args(), {});
  for (int64_t i = 0; i < 4 * 64; ++i) {
    EXPECT_EQ(std::isnan(to_float(attention.output[i])), i < 2 * 64) << bad << " " << i;
  }
  for (int64_t head = 0; head < 4; ++head) {
    EXPECT_EQ(std::isnan(attention.log_sum_exp[head]), head < 2) << bad;
  }
}

TEST_P(PagedAttention, WhatIsNoNumberIsSeen) {
  for (const int64_t pages : {8, 1500}) {
    for (const float softcap : {0.0f, 2.0f}) {
      expect_seen<float>(std::numeric_limits<float>::quiet_NaN(), pages, softcap);
      expect_seen<BFloat16>(std::numeric_limits<float>::quiet_NaN(), pages, softcap);
    }
    expect_seen<Float16>(std::numeric_limits<float>::infinity(), pages, 0.0f);
  }
}

/// The pieces in falling order on other threads: nothing may depend on who does what when.
void contrary_for(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t i = count - 1; i >= 0; --i) std::thread(body, i, i + 1).join();
}

TEST_P(PagedAttention, ThreadsDoNotChangeABit) {
  for (const int64_t pages : {40, 1500}) {
    const AttentionShape shape{.batch = 2, .kv_heads = 2, .ratio = 3, .pages = pages};
    AttentionCase<float> alone(shape), threaded(shape);
    paged_attention(alone.args(), {});
    const ParallelFor parallel = contrary_for;
    paged_attention(threaded.args(), {.parallel = &parallel});
    EXPECT_EQ(alone.output, threaded.output);
    EXPECT_EQ(alone.log_sum_exp, threaded.log_sum_exp);
  }
}

KVSWAP_EVERY_LEVEL(PagedAttention);

}  // namespace
}  // namespace kvswap
