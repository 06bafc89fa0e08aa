#include "kernels/cpu/vnni.h"

#include "io/status.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <vector>

#include "kernels/cpu_features.h"

namespace kvswap {
namespace {

#define KVSWAP_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")))

inline constexpr int64_t kStep = kInt8Columns * kSummaryBlock;  // bytes of four columns

/// Byte 4 t + c of the result is byte 16 c + t: what stands by columns then stands by tokens.
KVSWAP_VNNI inline __m512i by_tokens() {
  alignas(64) uint8_t from[64];
  for (int i = 0; i < 64; ++i) from[i] = static_cast<uint8_t>(i % 4 * 16 + i / 4);
  return _mm512_load_si512(from);
}

/// The product takes one side without sign: rows are raised by 128, and 128 times the sum of the
/// query is taken off again.
KVSWAP_VNNI int32_t raised_by(const int8_t* query, int64_t stride) {
  int32_t sum = 0;
  for (int64_t r = 0; r < stride; ++r) sum += query[r];
  return 128 * sum;
}

/// One block of 16 tokens against kQueries queries, whose sums stay in registers.
template <int kQueries>
KVSWAP_VNNI inline void score_block(const Int8ScoreArgs& args, int64_t block, int64_t first_query,
                                    const int32_t* raised) {
  const int64_t stride = int8_stride(args.rank);
  const int8_t* rows = args.summary + block * args.rank * kSummaryBlock;
  const int8_t* query = args.query + first_query * stride;
  const __m512i order = by_tokens();
  const __m512i high = _mm512_set1_epi8(-128);
  __m512i sums[kQueries];
#pragma GCC unroll 16
  for (int q = 0; q < kQueries; ++q) sums[q] = _mm512_set1_epi32(-raised[first_query + q]);
  for (int64_t r = 0; r < args.rank; r += kInt8Columns) {
    const int64_t left = (args.rank - r) * kSummaryBlock;
    const __mmask64 there = left >= kStep ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const __m512i columns = _mm512_maskz_loadu_epi8(there, rows + r * kSummaryBlock);
    const __m512i tokens =
        _mm512_xor_si512(_mm512_maskz_permutexvar_epi8(~__mmask64{0}, order, columns), high);
#pragma GCC unroll 16
    for (int q = 0; q < kQueries; ++q) {
      int32_t four;
      std::memcpy(&four, query + q * stride + r, sizeof(four));
      sums[q] = _mm512_dpbusd_epi32(sums[q], tokens, _mm512_set1_epi32(four));
    }
  }
  const __m512 scale = _mm512_loadu_ps(args.token_scale + block * kSummaryBlock);
#pragma GCC unroll 16
  for (int q = 0; q < kQueries; ++q) {
    _mm512_storeu_ps(args.scores + (first_query + q) * args.score_stride + block * kSummaryBlock,
                     _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums[q]), scale));
  }
}

}  // namespace

bool has_vnni() {
  static const bool is_here = __builtin_cpu_supports("avx512vnni") &&
                              __builtin_cpu_supports("avx512vbmi") &&
                              __builtin_cpu_supports("avx512bw");
  return is_here && simd_level() == "AVX3";
}

KVSWAP_VNNI void int8_score_vnni(const Int8ScoreArgs& args) {
  thread_local std::vector<int32_t> raised;  // [queries]
  raised.resize(args.queries);
  for (int64_t q = 0; q < args.queries; ++q) {
    raised[q] = raised_by(args.query + q * int8_stride(args.rank), int8_stride(args.rank));
  }
  for (int64_t block = 0; block < args.blocks; ++block) {
    int64_t q = 0;
    for (; q + 16 <= args.queries; q += 16) score_block<16>(args, block, q, raised.data());
    for (; q + 4 <= args.queries; q += 4) score_block<4>(args, block, q, raised.data());
    for (; q < args.queries; ++q) score_block<1>(args, block, q, raised.data());
  }
}

}  // namespace kvswap

#else

namespace kvswap {

bool has_vnni() { return false; }
void int8_score_vnni(const Int8ScoreArgs&) { KVSWAP_ASSERT(false); }

}  // namespace kvswap

#endif
