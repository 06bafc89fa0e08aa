#include "kernels/digit_score.h"

#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/vnni.h"

namespace kvswap {
namespace {

constexpr int kDigits = 3;
constexpr int kQueriesAtOnce = 4;
constexpr int64_t kRankMax = 1024;              // what sums of products may have in 32 bits
constexpr int64_t kStep = 64;                   // bytes of rows that are multiplied at once
constexpr float kLargest = 127.0f * 256 * 256;  // that three digits of -128..127 hold
constexpr float kQueryMin = 1e-25f;             // of the largest column: its inverse is finite
// Asked for this far ahead, of rows and of scales: the processor's own guess begins anew with each
// piece of a summary, and asks for one of the two streams late.
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kScalesAhead = 32;  // blocks

/// As the products take them: columns in the order of a step's, zeros after the last.
struct Query {
  alignas(64) int8_t digits[kDigits][kRankMax];  // the last is the highest
  int32_t raised[kDigits] = {};                  // what raising the rows adds to a sum
  float scale = 0;                               // of the lowest digit
};

/// How much levels are raised so that none is below zero: the product takes them without sign.
constexpr int32_t raise_of(DType dtype) { return dtype == DType::kInt4 ? 8 : 128; }

KVSWAP_VNNI_INLINE __mmask16 lanes_left(int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1U << left) - 1);
}

/// 0 where a column is no number.
KVSWAP_VNNI float largest_of(const float* query, int64_t rank) {
  const __m512 limit = _mm512_set1_ps(std::numeric_limits<float>::max());
  __m512 largest = _mm512_set1_ps(0.0f);
  __mmask16 others = 0;
  for (int64_t column = 0; column < rank; column += 16) {
    const __mmask16 there = lanes_left(rank - column);
    const __m512 magnitudes = _mm512_abs_ps(_mm512_maskz_loadu_ps(there, query + column));
    others |= _mm512_cmp_ps_mask(magnitudes, limit, _CMP_NLE_UQ);
    largest = _mm512_maskz_max_ps(0xffff, largest, magnitudes);
  }
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, largest);
  return others != 0 ? 0.0f : *std::max_element(lanes, lanes + 16);
}

/// Bytes of 16 columns in the order in which a step multiplies them: of int4 the four that stand in
/// low halves, then those of the high ones.
template <DType kType>
KVSWAP_VNNI_INLINE __m128i in_order(__m128i bytes) {
  if constexpr (kType == DType::kInt8) return bytes;
  return _mm_shuffle_epi8(bytes,
                          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

template <DType kType>
KVSWAP_VNNI bool split(const float* source, int64_t rank, Query& query) {
  const float largest = largest_of(source, rank);
  if (!(largest >= kQueryMin)) return false;
  query.scale = largest / kLargest;
  const __m512 inverse = _mm512_set1_ps(kLargest / largest);
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(kLargest));
  std::fill_n(query.raised, kDigits, 0);
  for (int64_t column = 0; column < rank; column += 16) {
    const __m512 numbers = _mm512_maskz_loadu_ps(lanes_left(rank - column), source + column);
    __m512i left = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(numbers, inverse));
    left = _mm512_maskz_min_epi32(0xffff, left, limit);
    left = _mm512_maskz_max_epi32(0xffff, left, _mm512_sub_epi32(_mm512_setzero_si512(), limit));
    for (int d = 0; d < kDigits; ++d) {
      const __m512i high = _mm512_maskz_slli_epi32(0xffff, left, 24);
      const __m512i digit = _mm512_maskz_srai_epi32(0xffff, high, 24);
      left = _mm512_maskz_srai_epi32(0xffff, _mm512_sub_epi32(left, digit), 8);
      const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, digit);
      _mm_store_si128(reinterpret_cast<__m128i*>(query.digits[d] + column), in_order<kType>(bytes));
      alignas(64) int32_t lanes[16];
      _mm512_store_si512(lanes, digit);
      for (const int32_t lane : lanes) query.raised[d] += raise_of(kType) * lane;
    }
  }
  return true;
}

KVSWAP_VNNI_INLINE __m512i four_columns(const int8_t* digits) {
  int32_t four;
  std::memcpy(&four, digits, sizeof(four));
  return _mm512_set1_epi32(four);
}

template <int kQueries>
using Sums = __m512i[kQueries][kDigits];

/// Adds the products of a step of four columns that stand by tokens.
template <int kQueries>
KVSWAP_VNNI_INLINE void add_products(__m512i levels, const Query* queries, int64_t column,
                                     Sums<kQueries>& sums) {
#pragma GCC unroll 16
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 16
    for (int d = 0; d < kDigits; ++d) {
      sums[q][d] =
          _mm512_dpbusd_epi32(sums[q][d], levels, four_columns(queries[q].digits[d] + column));
    }
  }
}

/// Scores of rows of one type with some queries.
template <DType kType, int kQueries>
class Scorer {
 public:
  KVSWAP_VNNI_INLINE Scorer(const LowRankScoreArgs& args, const Query* queries, int64_t first)
      : args_(args), queries_(queries), first_(first), order_(by_tokens()) {}

  KVSWAP_VNNI void run() const {
    const int64_t block_bytes = row_bytes(kType, args_.rank) * kSummaryBlock;
    const auto* rows = static_cast<const uint8_t*>(args_.summary);
    for (int64_t block = 0; block < args_.blocks; ++block) {
      _mm_prefetch(scales_ahead(block), _MM_HINT_T1);
      Sums<kQueries> sums;
      start(sums);
      add_block(rows + block * block_bytes, block_bytes, rows_ahead(block, block_bytes), sums);
      finish(block, sums);
    }
  }

 private:
  /// What is read a while after a block: of these rows, or of the next.
  KVSWAP_VNNI_INLINE const uint8_t* rows_ahead(int64_t block, int64_t block_bytes) const {
    const int64_t ahead = block + kAheadBytes / block_bytes;
    const bool is_here = ahead < args_.blocks || args_.next_summary == nullptr;
    const auto* from = static_cast<const uint8_t*>(is_here ? args_.summary : args_.next_summary);
    return from + ahead % args_.blocks * block_bytes;
  }
  KVSWAP_VNNI_INLINE const float* scales_ahead(int64_t block) const {
    const int64_t ahead = block + kScalesAhead;
    const bool is_here = ahead < args_.blocks || args_.next_scale == nullptr;
    return (is_here ? args_.token_scale : args_.next_scale) + ahead % args_.blocks * kSummaryBlock;
  }

  KVSWAP_VNNI_INLINE void start(Sums<kQueries>& sums) const {
#pragma GCC unroll 16
    for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 16
      for (int d = 0; d < kDigits; ++d) sums[q][d] = _mm512_set1_epi32(-queries_[q].raised[d]);
    }
  }

  KVSWAP_VNNI_INLINE void add_block(const uint8_t* rows, int64_t bytes, const uint8_t* ahead,
                                    Sums<kQueries>& sums) const {
    constexpr int64_t kColumns = kType == DType::kInt4 ? 8 : 4;
    int64_t column = 0;
    int64_t at = 0;
    for (; at + kStep <= bytes; at += kStep, column += kColumns) {
      _mm_prefetch(ahead + at, _MM_HINT_T1);
      add_step(_mm512_loadu_si512(rows + at), column, sums);
    }
    if (at == bytes) return;
    const __mmask64 there = (__mmask64{1} << (bytes - at)) - 1;
    add_step(_mm512_maskz_loadu_epi8(there, rows + at), column, sums);
  }

  KVSWAP_VNNI_INLINE void add_step(__m512i bytes, int64_t column, Sums<kQueries>& sums) const {
    const __m512i tokens = _mm512_maskz_permutexvar_epi8(~__mmask64{0}, order_, bytes);
    if constexpr (kType == DType::kInt8) {
      add_products<kQueries>(_mm512_xor_si512(tokens, _mm512_set1_epi8(-128)), queries_, column,
                             sums);
    } else {
      const __m512i raised = _mm512_xor_si512(tokens, _mm512_set1_epi8(-120));
      const __m512i low_half = _mm512_set1_epi8(15);
      const __m512i high = _mm512_maskz_srli_epi16(~__mmask32{0}, raised, 4);
      add_products<kQueries>(_mm512_and_si512(raised, low_half), queries_, column, sums);
      add_products<kQueries>(_mm512_and_si512(high, low_half), queries_, column + 4, sums);
    }
  }

  KVSWAP_VNNI_INLINE void finish(int64_t block, const Sums<kQueries>& sums) const {
    const __m512 token_scale = _mm512_loadu_ps(args_.token_scale + block * kSummaryBlock);
#pragma GCC unroll 16
    for (int q = 0; q < kQueries; ++q) {
      __m512 total = as_floats(sums[q][kDigits - 1]);
#pragma GCC unroll 16
      for (int d = kDigits - 2; d >= 0; --d) {
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256.0f), as_floats(sums[q][d]));
      }
      total = _mm512_mul_ps(total, _mm512_set1_ps(queries_[q].scale));
      _mm512_storeu_ps(args_.scores + (first_ + q) * args_.score_stride + block * kSummaryBlock,
                       _mm512_mul_ps(total, token_scale));
    }
  }

  const LowRankScoreArgs& args_;
  const Query* queries_;
  int64_t first_;
  __m512i order_;
};

/// Queries that are no digits are found before anything is written.
template <DType kType>
KVSWAP_VNNI bool score(const LowRankScoreArgs& args) {
  for (int64_t query = 0; query < args.queries; ++query) {
    if (!(largest_of(args.query + query * args.rank, args.rank) >= kQueryMin)) return false;
  }
  Query queries[kQueriesAtOnce];
  for (int64_t first = 0; first < args.queries;) {
    const int64_t count = args.queries - first >= kQueriesAtOnce ? kQueriesAtOnce : 1;
    for (int64_t q = 0; q < count; ++q) {
      split<kType>(args.query + (first + q) * args.rank, args.rank, queries[q]);
    }
    if (count == kQueriesAtOnce) {
      Scorer<kType, kQueriesAtOnce>(args, queries, first).run();
    } else {
      Scorer<kType, 1>(args, queries, first).run();
    }
    first += count;
  }
  return true;
}

}  // namespace

bool digit_score(const LowRankScoreArgs& args) {
  if (!has_vnni() || !has_row_scales(args.dtype) || args.token_scale == nullptr ||
      args.rank > kRankMax) {
    return false;
  }
  return args.dtype == DType::kInt4 ? score<DType::kInt4>(args) : score<DType::kInt8>(args);
}

}  // namespace kvswap

#else

namespace kvswap {

bool digit_score(const LowRankScoreArgs&) { return false; }

}  // namespace kvswap

#endif
