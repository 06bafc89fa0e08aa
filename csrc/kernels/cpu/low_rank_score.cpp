#include "kernels/low_rank_score.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/low_rank_score.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int64_t kBlockVectors = kSummaryBlock / kLanes;
/// Whose sums fit into the registers, so that a row is widened once for all.
inline constexpr int kQueriesMax = kBlockVectors == 1 ? 16 : 4;

template <int kQueries>
using Sums = Floats[kQueries][kBlockVectors];

/// sums[q][v] += query[q] * keys, which are a vector of one column.
template <int kQueries>
inline void add_keys(Floats keys, int64_t v, const float* query, int64_t rank,
                     Sums<kQueries>& sums) {
  KVSWAP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    sums[q][v] = multiply_add(keys, fill(query[q * rank]), sums[q][v]);
  }
}

template <typename T>
inline constexpr int kColumnsAtOnce = std::is_same_v<T, Int4Pair> ? 2 : 1;

/// One column of a block, or the pair that shares bytes, the second into the strand after the
/// first's; a pair at the rank's end may be one column. Read once for all queries.
template <typename T, int kQueries, int kStrands>
inline void add_columns(const T* rows, int64_t column, const float* query, int64_t rank, int strand,
                        Sums<kQueries> (&sums)[kStrands]) {
  KVSWAP_UNROLL
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    if constexpr (kColumnsAtOnce<T> == 2) {
      Floats low, high;
      load_pair(rows + column / 2 * kSummaryBlock + v * kLanes, low, high);
      add_keys<kQueries>(low, v, query + column, rank, sums[strand]);
      if (column + 1 == rank) continue;
      const int second = strand + 1 < kStrands ? strand + 1 : strand;
      add_keys<kQueries>(high, v, query + column + 1, rank, sums[second]);
    } else {
      const Floats keys = load(rows + column * kSummaryBlock + v * kLanes);
      add_keys<kQueries>(keys, v, query + column, rank, sums[strand]);
    }
  }
}

template <typename T>
inline int64_t block_bytes(int64_t rank) {
  const int64_t rows = (rank + kColumnsAtOnce<T> - 1) / kColumnsAtOnce<T>;
  return rows * kSummaryBlock * int64_t{sizeof(T)};
}

template <typename T>
inline const T* block_of(const LowRankScoreArgs& args, int64_t block) {
  const auto* rows = static_cast<const std::byte*>(args.summary);
  return reinterpret_cast<const T*>(rows + block * block_bytes<T>(args.rank));
}

/// One block against kQueries queries. Columns are summed in several strands, so that an addition
/// does not wait for the one before it.
template <typename T, int kQueries>
void score_block(const LowRankScoreArgs& args, int64_t block, int64_t first_query) {
  constexpr int kStrands = std::max<int>(1, 8 / (kQueries * kBlockVectors));
  constexpr int kAtOnce = kColumnsAtOnce<T>;
  constexpr int kStep = std::max(kStrands, kAtOnce);
  const T* rows = block_of<T>(args, block);
  const float* query = args.query + first_query * args.rank;
  Sums<kQueries> sums[kStrands];
  KVSWAP_UNROLL
  for (auto& strand : sums) {
    KVSWAP_UNROLL
    for (auto& vectors : strand) std::fill_n(vectors, kBlockVectors, zeros());
  }
  int64_t column = 0;
  for (; column + kStep <= args.rank; column += kStep) {
    KVSWAP_UNROLL
    for (int s = 0; s < kStep; s += kAtOnce) {
      add_columns<T, kQueries, kStrands>(rows, column + s, query, args.rank, s, sums);
    }
  }
  for (; column < args.rank; column += kAtOnce) {
    add_columns<T, kQueries, 1>(rows, column, query, args.rank, 0,
                                reinterpret_cast<Sums<kQueries>(&)[1]>(sums));
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
  const auto* rows = reinterpret_cast<const std::byte*>(block_of<T>(args, block));
  const int64_t bytes = block_bytes<T>(args.rank);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(rows + at);
  if (args.token_scale) __builtin_prefetch(args.token_scale + block * kSummaryBlock);
}

template <typename T>
void score_blocks(const LowRankScoreArgs& args) {
  constexpr int64_t kAheadBytes = 4096;
  const int64_t bytes = block_bytes<T>(args.rank);
  const int64_t ahead = (kAheadBytes + bytes - 1) / bytes;
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
    case DType::kInt4:
      return score_blocks<Int4Pair>(args);
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
