// What CUDA runs where no flash attention fits, against torch's flash attention on the CPU.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "torch/partial_attention.h"

namespace kvswap {
namespace {

struct Case {
  int64_t heads, kv_heads, rows, count, head_dim;
};

struct Tensors {
  at::Tensor query, keys, values;
  explicit Tensors(const Case& of) {
    at::manual_seed(of.rows * 1000 + of.count);
    query = at::randn({of.heads, of.rows, of.head_dim});
    keys = at::randn({of.kv_heads, of.count, of.head_dim});
    values = at::randn({of.kv_heads, of.count, of.head_dim});
  }
};

void expect_close(const PartialAttention& got, const PartialAttention& expected) {
  EXPECT_TRUE(at::allclose(got.output, expected.output, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(got.log_sum_exp, expected.log_sum_exp, 1e-4, 1e-5));
}

TEST(PartialAttention, InRowsIsWhatFlashAttentionGives) {
  for (const Case& each : {Case{4, 2, 37, 50, 16}, {6, 6, 1, 9, 8}, {8, 1, 20, 20, 64}}) {
    const Tensors t(each);
    const auto both = [&](Causal causal, const std::optional<at::Tensor>& allowed) {
      expect_close(attend_part_in_rows(t.query, t.keys, t.values, causal, allowed, {.scale = 0.3}),
                   attend_part(t.query, t.keys, t.values, causal, allowed, {.scale = 0.3}));
    };
    both(Causal::kNo, std::nullopt);
    both(Causal::kNo, at::arange(each.count).remainder(3).ne(1));
    both(Causal::kNo, at::arange(each.count).le(at::arange(each.rows).unsqueeze(1) + 2));
    if (each.rows == each.count) both(Causal::kYes, std::nullopt);
  }
}

TEST(PartialAttention, ValuesNarrowerThanKeys) {
  Tensors t({4, 2, 20, 20, 24});
  const at::Tensor wide = at::cat({t.values.narrow(2, 0, 10), at::zeros({2, 20, 14})}, 2);
  t.values = t.values.narrow(2, 0, 10).contiguous();
  for (const Causal causal : {Causal::kNo, Causal::kYes}) {
    const PartialAttention expected =
        attend_part(t.query, t.keys, wide, causal, std::nullopt, {.scale = 0.3});
    for (auto* attend : {attend_part, attend_part_in_rows}) {
      const PartialAttention got =
          attend(t.query, t.keys, t.values, causal, std::nullopt, {.scale = 0.3});
      EXPECT_EQ(got.output.sizes(), (at::IntArrayRef{4, 20, 10}));
      expect_close(got, {expected.output.narrow(2, 0, 10), expected.log_sum_exp});
    }
  }
}

TEST(PartialAttention, ManyRowsAreComputedInPieces) {
  const Tensors t({16, 2, 700, 700, 8});
  const Tensors wide({64, 2, 40, 9000, 8});
  expect_close(
      attend_part_in_rows(t.query, t.keys, t.values, Causal::kYes, std::nullopt, {.scale = 0.3}),
      attend_part(t.query, t.keys, t.values, Causal::kYes, std::nullopt, {.scale = 0.3}));
  expect_close(
      attend_part_in_rows(wide.query, wide.keys, wide.values, Causal::kNo, std::nullopt,
                          {.scale = 0.3}),
      attend_part(wide.query, wide.keys, wide.values, Causal::kNo, std::nullopt, {.scale = 0.3}));
}

TEST(PartialAttention, ARowThatSeesNothingCountsForNothing) {
  const Tensors t({4, 2, 5, 12, 8});
  at::Tensor allowed = at::ones({5, 12}, at::kBool);
  allowed[3].zero_();
  PartialAttention part =
      attend_part_in_rows(t.query, t.keys, t.values, Causal::kNo, allowed, {.scale = 0.3});
  EXPECT_TRUE(part.output.select(1, 3).eq(0).all().item<bool>());
  EXPECT_TRUE(part.log_sum_exp.select(1, 3).isneginf().all().item<bool>());
  EXPECT_TRUE(part.output.isfinite().all().item<bool>());
}

TEST(PartialAttention, TwoSidesThatSeeNothingGiveNothing) {
  const auto nothing = [] {
    return PartialAttention{at::zeros({2, 3, 8}),
                            at::full({2, 3}, -std::numeric_limits<float>::infinity())};
  };
  const Tensors t({2, 1, 3, 12, 8});
  const PartialAttention some =
      attend_part(t.query, t.keys, t.values, Causal::kNo, std::nullopt, {.scale = 0.3});
  for (auto* merge : {merge_part, merge_part_in_torch}) {
    PartialAttention merged = nothing();
    merge(merged, nothing());
    expect_close(merged, nothing());
    merge(merged, some);
    expect_close(merged, some);
    merge(merged, nothing());
    expect_close(merged, some);
  }
}

TEST(PartialAttention, MergedPartsAreTheWhole) {
  const Tensors t({4, 2, 21, 60, 16});
  const auto part = [&](int64_t first, int64_t count) {
    return attend_part_in_rows(t.query, t.keys.narrow(1, first, count),
                               t.values.narrow(1, first, count), Causal::kNo, std::nullopt,
                               {.scale = 0.3});
  };
  PartialAttention merged = part(0, 17);
  merge_part(merged, part(17, 43));
  expect_close(merged, part(0, 60));
  merged = part(0, 17);
  merge_part_in_torch(merged, part(17, 43));
  expect_close(merged, part(0, 60));
}

}  // namespace
}  // namespace kvswap
