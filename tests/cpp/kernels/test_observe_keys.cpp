#include "kernels/mass_reference.h"
#include "kernels/observe_keys.h"

namespace kvswap {
namespace {

class ObserveKeys : public KernelTest {};

template <typename T>
void expect_matches_reference(const ChunkShape& shape) {
  const ChunkCase<T> chunk(shape);
  ObserveKeysArgs args = chunk.args();
  std::vector<float> mean(shape.batch * shape.kv_heads * shape.tokens, -7.0f);
  std::vector<float> square = mean;
  args.mean = mean.data();
  args.square = square.data();
  observe_keys(args, {});
  chunk.expected().expect(mean, square);
}

TEST_P(ObserveKeys, OfEveryTypeAndShape) {
  for (const ChunkShape& shape :
       {ChunkShape{},
        {.batch = 1, .ratio = 4, .queries = 64, .tokens = 64},
        {.kv_heads = 1, .ratio = 3, .queries = 1, .tokens = 700, .head_dim = 72},
        {.queries = 32, .tokens = 130, .has_padding = true},
        {.batch = 1, .kv_heads = 3, .ratio = 1, .queries = 2, .tokens = 5, .head_dim = 256}}) {
    expect_matches_reference<float>(shape);
    expect_matches_reference<BFloat16>(shape);
    expect_matches_reference<Float16>(shape);
  }
}

TEST_P(ObserveKeys, WithWhatEarlierChunksTook) {
  const ChunkShape shape;
  const ChunkCase<float> chunk(shape);
  ObserveKeysArgs args = chunk.args();
  std::vector<float> log_sum_exp;
  for (int64_t i = 0; i < shape.batch * chunk.heads * shape.queries; ++i) {
    double total = 25;
    for (int64_t t = 0; t <= shape.tokens - shape.queries + i % shape.queries; ++t) {
      const int64_t kv_head = i / shape.queries % chunk.heads / shape.ratio;
      total += std::exp(chunk.score(i, i / shape.queries / chunk.heads, kv_head, t));
    }
    log_sum_exp.push_back(static_cast<float>(std::log(total)));
  }
  std::vector<float> mean(shape.batch * shape.kv_heads * shape.tokens), square = mean;
  args.log_sum_exp = log_sum_exp.data();
  args.mean = mean.data();
  args.square = square.data();
  observe_keys(args, {});
  chunk.expected(25).expect(mean, square);
}

TEST_P(ObserveKeys, ASequenceOfPaddingAloneHasNoMass) {
  const ChunkShape shape{.batch = 1, .tokens = 64, .has_padding = true};
  ChunkCase<float> chunk(shape);
  chunk.valid.assign(1, 0);
  ObserveKeysArgs args = chunk.args();
  std::vector<float> mean(shape.kv_heads * shape.tokens, -7.0f);
  args.mean = mean.data();
  observe_keys(args, {});
  EXPECT_EQ(mean, std::vector<float>(mean.size(), 0.0f));
}

KVSWAP_EVERY_LEVEL(ObserveKeys);

}  // namespace
}  // namespace kvswap
