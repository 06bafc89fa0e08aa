#include <numeric>

#include "kernels/attention_mass.h"
#include "kernels/mass_reference.h"

namespace kvswap {
namespace {

class AttentionMass : public KernelTest {};

template <typename T>
struct Weighed {
  explicit Weighed(const AttentionShape& shape, const Execution& execution = {})
      : attention(shape) {
    PagedAttentionArgs args = attention.args();
    paged_attention(args, execution);
    const int64_t slots = shape.batch * shape.kv_heads * shape.pages * shape.group_tokens;
    mean.assign(slots, -7.0f);
    square.assign(slots, -7.0f);
    args.output = nullptr;
    attention_mass({.attention = args, .mean = mean.data(), .square = square.data()}, execution);
  }

  AttentionCase<T> attention;
  std::vector<float> mean, square;
};

template <typename T>
void expect_matches_reference(const AttentionShape& shape) {
  const Weighed<T> weighed(shape);
  expected_mass(weighed.attention).expect(weighed.mean, weighed.square);
}

TEST_P(AttentionMass, OfEveryTypeAndShape) {
  for (const AttentionShape& shape :
       {AttentionShape{.kv_heads = 2, .ratio = 3, .pages = 20},
        {.batch = 3, .kv_heads = 2, .ratio = 1, .group_tokens = 13, .head_dim = 72, .pages = 11},
        {.batch = 2, .kv_heads = 2, .ratio = 2, .queries = 5, .group_tokens = 32, .pages = 40},
        {.batch = 3, .kv_heads = 4, .ratio = 4, .pages = 25, .table_per_head = true},
        {.batch = 2, .kv_heads = 2, .ratio = 3, .head_dim = 72, .pages = 25, .value_dim = 40},
        {.kv_heads = 1, .ratio = 8, .group_tokens = 1, .head_dim = 1, .pages = 9},
        {.kv_heads = 1, .ratio = 2, .group_tokens = 64, .head_dim = 256, .pages = 20}}) {
    expect_matches_reference<float>(shape);
    expect_matches_reference<BFloat16>(shape);
    expect_matches_reference<Float16>(shape);
  }
}

TEST_P(AttentionMass, MeansOfAHeadSumToOne) {
  const AttentionShape shape{.batch = 2, .kv_heads = 2, .ratio = 3, .pages = 30};
  const Weighed<float> weighed(shape);
  const int64_t slots = shape.pages * shape.group_tokens;
  for (int64_t head = 0; head < 4; ++head) {
    const float* of_head = weighed.mean.data() + head * slots;
    EXPECT_NEAR(std::accumulate(of_head, of_head + slots, 0.0), 1.0, 1e-5);
  }
}

TEST_P(AttentionMass, OfQueriesThatSeeNothingIsNothing) {
  AttentionCase<float> attention({.batch = 2, .kv_heads = 2, .ratio = 2});
  std::fill(attention.masks.begin(), attention.masks.end(), 0);
  PagedAttentionArgs args = attention.args();
  paged_attention(args, {});
  std::vector<float> mean(2 * 2 * args.pages_max * args.shape.group_tokens, -7.0f);
  attention_mass({.attention = args, .mean = mean.data()}, {});
  EXPECT_EQ(mean, std::vector<float>(mean.size(), 0.0f));
}

/// The pieces in falling order: nothing may depend on who does what when.
void contrary_for(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t i = count - 1; i >= 0; --i) body(i, i + 1);
}

TEST_P(AttentionMass, ThreadsDoNotChangeABit) {
  const AttentionShape shape{.batch = 2, .kv_heads = 2, .ratio = 3, .pages = 700};
  const ParallelFor parallel = contrary_for;
  const Weighed<float> alone(shape), threaded(shape, {.parallel = &parallel});
  EXPECT_EQ(alone.mean, threaded.mean);
  EXPECT_EQ(alone.square, threaded.square);
}

KVSWAP_EVERY_LEVEL(AttentionMass);

}  // namespace
}  // namespace kvswap
