#include "kernels/low_rank_score.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/low_rank_score.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int64_t kBlockVectors = kSummaryBlock / kLanes;

/// One block against kQueries queries: the block is read once.
template <typename T, int kQueries>
void score_block(const LowRankScoreArgs& args, int64_t block, int64_t first_query) {
  constexpr int kUnroll = std::max<int>(1, 8 / (kQueries * kBlockVectors));
  const T* rows = static_cast<const T*>(args.summary) + block * args.rank * kSummaryBlock;
  const float* query = args.query + first_query * args.rank;
  Floats sums[kUnroll][kQueries][kBlockVectors];
  for (auto& unrolled : sums) {
    for (auto& vectors : unrolled) std::fill_n(vectors, kBlockVectors, zeros());
  }
  const auto accumulate = [&](int64_t column, auto& into) HWY_ATTR {
    for (int64_t v = 0; v < kBlockVectors; ++v) {
      const Floats keys = load(rows + column * kSummaryBlock + v * kLanes);
      for (int64_t q = 0; q < kQueries; ++q) {
        into[q][v] = multiply_add(keys, fill(query[q * args.rank + column]), into[q][v]);
      }
    }
  };
  int64_t column = 0;
  for (; column + kUnroll <= args.rank; column += kUnroll) {
    for (int u = 0; u < kUnroll; ++u) accumulate(column + u, sums[u]);
  }
  for (; column < args.rank; ++column) accumulate(column, sums[0]);

  for (int64_t q = 0; q < kQueries; ++q) {
    float* scores = args.scores + (first_query + q) * args.score_stride + block * kSummaryBlock;
    for (int64_t v = 0; v < kBlockVectors; ++v) {
      Floats total = sums[0][q][v];
      for (int u = 1; u < kUnroll; ++u) total = add(total, sums[u][q][v]);
      if (args.token_scale) {
        total = multiply(total, load(args.token_scale + block * kSummaryBlock + v * kLanes));
      }
      store(total, scores + v * kLanes);
    }
  }
}

template <typename T>
void score_blocks(const LowRankScoreArgs& args) {
  for (int64_t block = 0; block < args.blocks; ++block) {
    int64_t query = 0;
    for (; query + 4 <= args.queries; query += 4) score_block<T, 4>(args, block, query);
    for (; query + 2 <= args.queries; query += 2) score_block<T, 2>(args, block, query);
    if (query < args.queries) score_block<T, 1>(args, block, query);
  }
}

void low_rank_score(const LowRankScoreArgs& args) {
  switch (args.dtype) {
    case DType::kFloat32: return score_blocks<float>(args);
    case DType::kBFloat16: return score_blocks<BFloat16>(args);
    case DType::kFloat16: return score_blocks<Float16>(args);
    case DType::kInt8: return score_blocks<int8_t>(args);
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(low_rank_score);

void low_rank_score(const LowRankScoreArgs& args) { KVSWAP_DISPATCH(low_rank_score)(args); }

}  // namespace kvswap
#endif  // HWY_ONCE
