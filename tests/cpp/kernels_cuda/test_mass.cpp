#include "kernels/cuda/kernels.h"
#include "kernels/mass_reference.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

template <typename T>
void expect_mass(const AttentionShape& shape) {
  AttentionCase<T> attention(shape);
  PagedAttentionArgs args = attention.args();
  paged_attention(args, {});
  const Mass expected = expected_mass(attention);
  GuardedBuffer<T> elements(attention.elements), query(attention.query);
  GuardedBuffer<float> sums(attention.log_sum_exp);
  for (const void*& page : attention.pages) {
    if (page == nullptr) continue;
    page = elements.data() + (static_cast<const T*>(page) - attention.elements.data());
  }
  args.query = query.data();
  args.log_sum_exp = sums.data();
  args.output = nullptr;
  const auto slots = static_cast<int64_t>(expected.mean.size());
  in_every_order([&] {
    GuardedBuffer<float> mean(slots), square(slots);
    expect_ok(cuda::attention_mass(
        {.attention = args, .mean = mean.data(), .square = square.data()}, nullptr));
    expected.expect(mean.copy(), square.copy());
  });
}

TEST(CudaAttentionMass, AsInDouble) {
  for (const AttentionShape& shape :
       {AttentionShape{.kv_heads = 2, .ratio = 3, .pages = 9},
        {.batch = 2, .kv_heads = 2, .queries = 3, .group_tokens = 13, .head_dim = 72, .pages = 5},
        {.batch = 2, .kv_heads = 3, .ratio = 2, .pages = 7, .table_per_head = true},
        {.kv_heads = 1, .group_tokens = 32, .head_dim = 256, .pages = 3},
        // Rows that are no whole vectors; and three tiles of query rows over three stages of slots.
        {.kv_heads = 2, .ratio = 2, .head_dim = 12, .pages = 5},
        {.batch = 1, .kv_heads = 1, .ratio = 5, .queries = 7, .group_tokens = 8, .pages = 70}}) {
    expect_mass<float>(shape);
    expect_mass<BFloat16>(shape);
    expect_mass<Float16>(shape);
  }
}

template <typename T>
void expect_observed(const ChunkShape& shape) {
  const ChunkCase<T> chunk(shape);
  const Mass expected = chunk.expected();
  GuardedBuffer<T> query(chunk.query), keys(chunk.keys);
  GuardedBuffer<uint64_t> valid(chunk.valid);
  ObserveKeysArgs args = chunk.args();
  args.query = query.data();
  args.keys = keys.data();
  if (shape.has_padding) args.valid = valid.data();
  const auto slots = static_cast<int64_t>(expected.mean.size());
  in_every_order([&] {
    GuardedBuffer<float> mean(slots), square(slots);
    GuardedBuffer<char> scratch(cuda::observe_keys_scratch_bytes(args));
    args.mean = mean.data();
    args.square = square.data();
    expect_ok(cuda::observe_keys(args, scratch.data(), nullptr));
    expected.expect(mean.copy(), square.copy());
  });
}

TEST(CudaObserveKeys, AsInDouble) {
  for (const ChunkShape& shape :
       {ChunkShape{.queries = 3, .tokens = 19},
        {.batch = 1, .queries = 5, .tokens = 5},
        {.ratio = 1, .queries = 2, .tokens = 70, .head_dim = 72, .has_padding = true}}) {
    expect_observed<float>(shape);
    expect_observed<BFloat16>(shape);
    expect_observed<Float16>(shape);
  }
}

}  // namespace
}  // namespace kvswap
