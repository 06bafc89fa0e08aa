#include "kernels/low_rank_score.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/low_rank_score.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int64_t kBlockVectors = kSummaryBlock / kLanes;
/// Whose sums fit into the registers, so that a row is widened once for all.
inline constexpr int kQueriesMax = kBlockVectors == 1 ? 16 : 4;

/// sums[q][v] += query[q, column] * column of a block, which is read once for all queries.
template <typename T, int kQueries>
inline void add_column(const T* row, const float* query, int64_t rank,
                       Floats (&sums)[kQueries][kBlockVectors]) {
  KVSWAP_UNROLL
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    const Floats keys = load(row + v * kLanes);
    KVSWAP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      sums[q][v] = multiply_add(keys, fill(query[q * rank]), sums[q][v]);
    }
  }
}

/// One block against kQueries queries. Columns are summed in several strands, so that an addition
/// does not wait for the one before it.
template <typename T, int kQueries>
void score_block(const LowRankScoreArgs& args, int64_t block, int64_t first_query) {
  constexpr int kStrands = std::max<int>(1, 8 / (kQueries * kBlockVectors));
  const T* rows = static_cast<const T*>(args.summary) + block * args.rank * kSummaryBlock;
  const float* query = args.query + first_query * args.rank;
  Floats sums[kStrands][kQueries][kBlockVectors];
  KVSWAP_UNROLL
  for (auto& strand : sums) {
    KVSWAP_UNROLL
    for (auto& vectors : strand) std::fill_n(vectors, kBlockVectors, zeros());
  }
  int64_t column = 0;
  for (; column + kStrands <= args.rank; column += kStrands) {
    KVSWAP_UNROLL
    for (int s = 0; s < kStrands; ++s) {
      add_column(rows + (column + s) * kSummaryBlock, query + column + s, args.rank, sums[s]);
    }
  }
  for (; column < args.rank; ++column) {
    add_column(rows + column * kSummaryBlock, query + column, args.rank, sums[0]);
  }
  KVSWAP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    float* scores = args.scores + (first_query + q) * args.score_stride + block * kSummaryBlock;
    KVSWAP_UNROLL
    for (int64_t v = 0; v < kBlockVectors; ++v) {
      Floats total = sums[0][q][v];
      KVSWAP_UNROLL
      for (int s = 1; s < kStrands; ++s) total = add(total, sums[s][q][v]);
      if (args.token_scale) {
        total = multiply(total, load(args.token_scale + block * kSummaryBlock + v * kLanes));
      }
      store(total, scores + v * kLanes);
    }
  }
}

/// Asks for a block that comes later: at each memory page the processor's own guess begins anew.
template <typename T>
inline void ask_for_block(const LowRankScoreArgs& args, int64_t block) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = args.rank * kSummaryBlock * int64_t{sizeof(T)};
  const char* rows = static_cast<const char*>(args.summary) + block * bytes;
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(rows + at);
  if (args.token_scale) __builtin_prefetch(args.token_scale + block * kSummaryBlock);
}

template <typename T>
void score_blocks(const LowRankScoreArgs& args) {
  constexpr int64_t kAheadBytes = 4096;
  const int64_t block_bytes = args.rank * kSummaryBlock * int64_t{sizeof(T)};
  const int64_t ahead = (kAheadBytes + block_bytes - 1) / block_bytes;
  for (int64_t block = 0; block < args.blocks; ++block) {
    if (block + ahead < args.blocks) ask_for_block<T>(args, block + ahead);
    int64_t query = 0;
    for (; query + kQueriesMax <= args.queries; query += kQueriesMax) {
      score_block<T, kQueriesMax>(args, block, query);
    }
    for (; query + 4 <= args.queries; query += 4) score_block<T, 4>(args, block, query);
    for (; query + 2 <= args.queries; query += 2) score_block<T, 2>(args, block, query);
    if (query < args.queries) score_block<T, 1>(args, block, query);
  }
}

void low_rank_score(const LowRankScoreArgs& args) {
  switch (args.dtype) {
    case DType::kFloat32:
      return score_blocks<float>(args);
    case DType::kBFloat16:
      return score_blocks<BFloat16>(args);
    case DType::kFloat16:
      return score_blocks<Float16>(args);
    case DType::kInt8:
      return score_blocks<int8_t>(args);
    case DType::kInt4:  // see int4_rows.h
      return;
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
