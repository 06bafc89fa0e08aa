#include "kernels/attention_reference.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/kernels.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

template <typename T>
class DeviceAttention {
 public:
  explicit DeviceAttention(const AttentionShape& shape)
      : attention(shape),
        elements(attention.elements),
        query(attention.query),
        sinks(attention.sinks) {
    for (const void*& page : attention.pages) {
      if (page == nullptr) continue;
      page = elements.data() + (static_cast<const T*>(page) - attention.elements.data());
    }
  }

  void run() {
    PagedAttentionArgs args = attention.args();
    args.query = query.data();
    args.sinks = attention.sinks.empty() ? nullptr : sinks.data();
    GuardedBuffer<T> output(static_cast<int64_t>(attention.output.size()));
    GuardedBuffer<float> sums(static_cast<int64_t>(attention.log_sum_exp.size()));
    GuardedBuffer<char> scratch(cuda::paged_attention_scratch_bytes(args));
    args.output = output.data();
    args.log_sum_exp = sums.data();
    expect_ok(cuda::paged_attention(args, scratch.data(), nullptr));
    attention.output = output.copy();
    attention.log_sum_exp = sums.copy();
  }

  AttentionCase<T> attention;

 private:
  GuardedBuffer<T> elements, query;
  GuardedBuffer<float> sinks;
};

template <typename T>
void expect_attention(const AttentionShape& shape) {
  DeviceAttention<T> device(shape);
  std::vector<T> first;
  in_every_order([&] {
    device.run();
    device.attention.expect_matches_reference();
    if (first.empty()) first = device.attention.output;
    EXPECT_TRUE(same_bits(first, device.attention.output)) << "the order of threads changes a bit";
  });
}

void expect_attention_of_all_types(const AttentionShape& shape) {
  expect_attention<float>(shape);
  expect_attention<BFloat16>(shape);
  expect_attention<Float16>(shape);
}

TEST(CudaAttention, HeadDims) {
  for (const int64_t head_dim : {8, 64, 72, 96, 128, 256}) {
    expect_attention_of_all_types(
        {.kv_heads = 2, .ratio = 2, .group_tokens = 4, .head_dim = head_dim, .pages = 23});
  }
}

TEST(CudaAttention, RatiosAndQueries) {
  for (const int64_t ratio : {1, 3, 16}) {
    for (const int64_t queries : {1, 5, 16}) {
      expect_attention_of_all_types({.kv_heads = 1,
                                     .ratio = ratio,
                                     .queries = queries,
                                     .group_tokens = 4,
                                     .head_dim = 64,
                                     .pages = 9});
    }
  }
}

TEST(CudaAttention, CappedScoresAndSinks) {
  for (const int64_t head_dim : {64, 256}) {  // beyond 128 two warps share a row's sums
    for (const float softcap : {0.0f, 0.7f}) {
      expect_attention_of_all_types({.ratio = 3,
                                     .queries = 2,
                                     .head_dim = head_dim,
                                     .pages = 20,  // two splits
                                     .softcap = softcap,
                                     .has_sinks = true});
    }
  }
  expect_attention_of_all_types({.kv_heads = 2, .ratio = 2, .pages = 2, .softcap = 2.0f});
}

TEST(CudaAttention, GroupSizesAndTables) {
  for (const int64_t group_tokens : {1, 7, 64}) {
    for (const bool per_head : {false, true}) {
      expect_attention_of_all_types({.batch = 2,
                                     .kv_heads = 2,
                                     .ratio = 2,
                                     .group_tokens = group_tokens,
                                     .head_dim = 64,
                                     .pages = 11,
                                     .table_per_head = per_head});
    }
  }
}

TEST(CudaAttention, ManyPages) {
  expect_attention_of_all_types({.ratio = 4, .group_tokens = 4, .head_dim = 64, .pages = 150});
  // More slots in a split than are looked up at once.
  expect_attention<BFloat16>({.group_tokens = 64, .head_dim = 8, .pages = 600});
}

TEST(CudaAttention, WhatIsNoNumberIsSeen) {
  for (const int64_t pages : {8, 150}) {
    DeviceAttention<Float16> device({.kv_heads = 2, .ratio = 2, .head_dim = 64, .pages = pages});
    AttentionCase<Float16>& attention = device.attention;
    attention.masks[3] = 0b11;
    const auto* page = static_cast<const Float16*>(attention.pages[3]);
    const_cast<Float16*>(page)[64 + 5] =  // K of the first KV head
        from_float<Float16>(std::numeric_limits<float>::quiet_NaN());
    device.run();
    for (int64_t i = 0; i < 4 * 64; ++i) {
      ASSERT_EQ(std::isnan(to_float(attention.output[i])), i < 2 * 64) << i;
    }
  }
}

TEST(CudaAttention, NothingSeen) {
  expect_attention_of_all_types({.batch = 2, .ratio = 2, .head_dim = 64, .pages = 0});
  DeviceAttention<Float16> device({.batch = 1, .ratio = 2, .head_dim = 64, .pages = 40});
  std::fill(device.attention.masks.begin(), device.attention.masks.end(), 0);
  device.run();
  device.attention.expect_matches_reference();
}

TEST(CudaAttention, RefusesOtherHeadDims) {
  AttentionCase<float> attention({.head_dim = 12});
  const Status status = cuda::paged_attention(attention.args(), nullptr, nullptr);
  EXPECT_NE(status.message().find("head_dim must be a multiple of 8"), std::string::npos);
}

TEST(CudaAttention, PlanCoversEverySlotOnce) {
  std::mt19937 generator(1);
  for (int i = 0; i < 2000; ++i) {
    PagedAttentionArgs args;
    const auto below = [&](int64_t limit) { return static_cast<int64_t>(generator()) % limit; };
    args.batch = 1 + below(64);
    args.shape = {1 + below(8), 1 + below(64), 128, 2};
    args.heads = args.shape.kv_heads * (1 + below(16));
    args.queries = 1 + below(16);
    args.pages_max = below(i % 2 ? 20000 : 20);
    args.dtype = i % 3 ? DType::kBFloat16 : DType::kFloat32;
    const cuda::AttentionPlan plan(args);
    ASSERT_GE(plan.row_tiles * plan.tile_rows, plan.ratio * args.queries);
    ASSERT_GE(plan.splits, plan.slots > 0 ? 1 : 0);
    ASSERT_LE(plan.splits, cuda::kSplitsMax);
    ASSERT_GE(plan.splits * plan.split_slots, plan.slots);
    if (plan.splits > 1) {
      ASSERT_LT((plan.splits - 1) * plan.split_slots, plan.slots);
    }
  }
}

}  // namespace
}  // namespace kvswap
