// Rows of the host under a device: the choice of the CPU, whatever order keys and queries stand in,
// with few copies.

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "device/counting_device.h"
#include "device/host_device.h"
#include "methods/selection/selector_factory.h"
#include "methods/summary/summary_store.h"

namespace kvswap {
namespace {

constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 6;
constexpr int64_t kDim = 8;
constexpr int64_t kRank = 5;
constexpr int64_t kTokens = 1040;  // four copies of 256, and a rest
constexpr int64_t kGroupTokens = 4;

/// Numbers [outer, heads, inner, head_dim] in the order that strides give, gaps among them.
struct Strided {
  std::vector<float> numbers;
  int64_t outer, heads, inner;

  Strided(int64_t size, uint32_t seed, int64_t outer, int64_t heads, int64_t inner)
      : numbers(size), outer(outer), heads(heads), inner(inner) {
    std::mt19937 random(seed);
    for (float& value : numbers) value = static_cast<float>(random() % 9) - 4;
  }
};

Strided token_major(int64_t batch, int64_t heads, int64_t tokens) {
  return {batch * tokens * heads * kDim, 1, tokens * heads * kDim, kDim, heads * kDim};
}
Strided head_major(int64_t batch, int64_t heads, int64_t tokens) {
  return {batch * tokens * heads * kDim, 2, tokens * heads * kDim, tokens * kDim, kDim};
}
/// Tokens are parts of longer rows, as of a projection that makes more than these.
Strided with_gaps(int64_t batch, int64_t heads, int64_t tokens) {
  const int64_t row = (heads + 3) * kDim;
  return {batch * tokens * row, 3, tokens * row, kDim, row};
}
/// One head that stands for all.
Strided expanded(int64_t batch, int64_t, int64_t tokens) {
  return {batch * tokens * kDim, 4, tokens * kDim, 0, kDim};
}

class Hosted {
 public:
  Hosted(const Strided& keys, int64_t batch) {
    const MethodOptions options = {.layers = 1,
                                   .heads = kHeads,
                                   .kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .group_tokens = kGroupTokens,
                                   .score = Score::kMax};
    auto inner = host_device({.delay_us_max = 20}).make();
    device = std::make_unique<CountingDevice>(std::move(inner.value()));
    cpu = make_selector(options, nullptr);
    hosted = make_selector(options, device.get());
    EXPECT_TRUE(hosted->reserve({}).is_ok());
    const Strided projection = token_major(1, 1, 2 * kKvHeads * kRank);
    validity.resize(batch);
    for (Selector* selector : {cpu.get(), hosted.get()}) {
      EXPECT_TRUE(selector
                      ->set_projection(0, kRank, projection.numbers.data(),
                                       projection.numbers.data() + kKvHeads * kDim * kRank)
                      .is_ok());
      selector->summaries().set_sequences(batch);
      for (int64_t b = 0; b < batch; ++b) {
        EXPECT_TRUE(
            selector
                ->append({.layer = 0,
                          .sequence = b,
                          .keys = {keys.numbers.data() + b * keys.outer, keys.heads, keys.inner},
                          .tokens = kTokens})
                .is_ok());
      }
    }
    for (PaddingMask& of : validity) of.append(kTokens, nullptr);
  }

  std::vector<std::vector<int32_t>> choose(Selector& selector, const Strided& query,
                                           int64_t queries, int64_t heads_apart) {
    std::vector<Candidates> candidates;
    for (const PaddingMask& of : validity) candidates.push_back({&of, {}});
    std::vector<std::vector<int32_t>> chosen;
    EXPECT_TRUE(selector
                    .start_choice({.layer = 0,
                                   .query = {.data = query.numbers.data(),
                                             .batch_stride = query.outer,
                                             .head_stride = query.heads,
                                             .query_stride = query.inner,
                                             .heads = kHeads,
                                             .queries = queries,
                                             .heads_apart = heads_apart},
                                   .groups = kTokens / kGroupTokens,
                                   .groups_per_query = 9,
                                   .candidates = candidates,
                                   .chosen = &chosen})
                    .is_ok());
    EXPECT_TRUE(selector.finish_choice().is_ok());
    return chosen;
  }

  std::unique_ptr<CountingDevice> device;
  std::unique_ptr<Selector> cpu, hosted;
  std::vector<PaddingMask> validity;
};

TEST(HostFallbackSelector, KeysThatStandWithoutGapsAreOneCopyAPiece) {
  constexpr int64_t kPieces = 5;
  EXPECT_EQ(Hosted(token_major(3, kKvHeads, kTokens), 3).device->counts.copies_out, 3 * kPieces);
  EXPECT_EQ(Hosted(head_major(3, kKvHeads, kTokens), 3).device->counts.copies_out,
            3 * kPieces * kKvHeads);
  EXPECT_EQ(Hosted(with_gaps(1, kKvHeads, kTokens), 1).device->counts.copies_out, kTokens);
}

TEST(HostFallbackSelector, QueriesThatStandWithoutGapsAreOneCopy) {
  constexpr int64_t kBatch = 8;
  Hosted of(token_major(kBatch, kKvHeads, kTokens), kBatch);
  for (const int64_t queries : {1, 3}) {
    for (const Strided& query :
         {token_major(kBatch, kHeads, queries), head_major(kBatch, kHeads, queries)}) {
      of.device->counts = {};
      of.choose(*of.hosted, query, queries, 1);
      EXPECT_EQ(of.device->counts.copies_out, 1) << queries;
    }
  }
}

TEST(HostFallbackSelector, ChoosesAsOnTheCpuWhateverOrderStridesGive) {
  constexpr int64_t kBatch = 4;
  for (const auto& keys : {token_major, head_major, with_gaps, expanded}) {
    Hosted of(keys(kBatch, kKvHeads, kTokens), kBatch);
    for (const auto& queries : {token_major, head_major, with_gaps, expanded}) {
      for (const int64_t count : {1, 3}) {
        for (const int64_t apart : {1, 2}) {
          const Strided query = queries(kBatch / apart, apart * kHeads, count);
          EXPECT_EQ(of.choose(*of.hosted, query, count, apart),
                    of.choose(*of.cpu, query, count, apart));
        }
      }
    }
  }
}

TEST(HostFallbackSelector, CopiesLandInMemoryThatIsPinnedUntilItGoes) {
  Hosted of(token_major(1, kKvHeads, kTokens), 1);
  EXPECT_GT(of.device->pinned_bytes(), 0);
  of.hosted.reset();
  EXPECT_EQ(of.device->pinned_bytes(), 0);
}

}  // namespace
}  // namespace kvswap
