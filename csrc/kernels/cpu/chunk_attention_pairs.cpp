#include "kernels/cpu/chunk_attention_pairs.h"

#if defined(__x86_64__)
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "kernels/cpu/bf16_pairs.h"
#include "kernels/cpu/chunk_rows.h"

// g++ 12 takes what its own intrinsics leave undefined on purpose for a fault.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvswap {
namespace {

using chunk::kLog2e;
using chunk::kNothing;
using chunk::kTileRows;
using chunk::SummaryEncoder;

constexpr int kLanes = 16;         // fp32 of a vector, and pairs of bf16
constexpr int kTileVectors = 4;    // with kTileRows, sums for 24 of 32 registers
constexpr int kBlockTokens = 256;  // of which K and V fill half of a small L2, scores of a tile L1
constexpr int kBlockVectors = kBlockTokens / kLanes;
constexpr int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

/// sums[r][v] = sum over `steps` pairs of left[r, s] * right[s, v].
template <int kVectors>
KVSWAP_BF16_INLINE void multiply(const uint32_t* left, int64_t left_stride, const uint32_t* right,
                                 int64_t step_stride, int64_t vector_stride, int64_t steps,
                                 __m512 (&sums)[kTileRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  for (int64_t s = 0; s < steps; ++s) {
    __m512i pairs[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      pairs[v] = _mm512_load_si512(right + s * step_stride + v * vector_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(left[r * left_stride + s]));
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)pair, (__m512bh)pairs[v]);
      }
    }
  }
}

/// 2^a for a < 127, within 3e-6 of it; 0 below -126, and NaN stays. The whole part is rounded into
/// the low bits of a sum, whence it becomes the exponent: those of a NaN of bf16 are zeros.
KVSWAP_BF16_INLINE __m512 power_of_two(__m512 a) {
  const __mmask16 there = _mm512_cmp_ps_mask(a, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 raised = _mm512_set1_ps(0x1.8p23f);
  const __m512 whole = _mm512_add_ps(a, raised);
  const __m512 fraction = _mm512_sub_ps(a, _mm512_sub_ps(whole, raised));
  __m512 value = _mm512_set1_ps(0.0095701003f);
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.055917859f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.24024744f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.69312179f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.99999928f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(whole), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(there, _mm512_castps_si512(value), exponent));
}

/// One KV head's rows, block by block.
class Attender {
 public:
  KVSWAP_BF16 explicit Attender(const ChunkAttentionArgs& args)
      : args_(args),
        pairs_(divide_up(args.shape.head_dim, 2)),
        vectors_(divide_up(args.shape.value_width(), kLanes)),
        factor_(is_capped() ? kLog2e : args.scale * kLog2e) {
    const int64_t query = divide_up(kTileRows * pairs_, kLanes) * kLanes;
    const int64_t words = kBlockTokens * pairs_ + kBlockTokens / 2 * vectors_ * kLanes + query +
                          kTileRows * kBlockTokens * 3 / 2;
    thread_local std::vector<uint32_t> scratch;
    if (static_cast<int64_t>(scratch.size()) < words + kLanes) scratch.resize(words + kLanes);
    const auto unaligned = std::bit_cast<uintptr_t>(scratch.data());
    keys_ = scratch.data() + (64 - unaligned % 64) % 64 / sizeof(uint32_t);
    values_ = keys_ + kBlockTokens * pairs_;
    query_ = values_ + kBlockTokens / 2 * vectors_ * kLanes;
    scores_ = reinterpret_cast<float*>(query_ + query);
    weights_ = reinterpret_cast<uint16_t*>(scores_ + kTileRows * kBlockTokens);
  }

  static int64_t block_tokens() { return kBlockTokens; }

  /// Tokens from `first` on; what is padding, or not there, as zeros that do not count.
  KVSWAP_BF16 void lay_out(int64_t kv_head, int64_t first, int64_t tokens) {
    const auto token = [&](int64_t side, int64_t t) {
      return chunk::token_of<uint16_t>(args_, kv_head, side, first + t);
    };
    std::fill_n(counted_, kBlockVectors, __mmask16{0});
    for (int64_t t = 0; t < divide_up(tokens, kLanes) * kLanes; ++t) {
      const uint16_t* key = t < tokens ? token(0, t) : nullptr;
      lay_out_key(key, keys_ + t / kLanes * pairs_ * kLanes + t % kLanes);
      if (key != nullptr) counted_[t / kLanes] |= static_cast<__mmask16>(1U << (t % kLanes));
    }
    for (int64_t t = 0; t < tokens; t += 2) {
      lay_out_values(token(1, t), t + 1 < tokens ? token(1, t + 1) : nullptr,
                     values_ + t / 2 * vectors_ * kLanes);
    }
  }

  KVSWAP_BF16 void attend(SummaryEncoder& rows) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      uint32_t* pairs = query_ + r * pairs_;
      std::fill_n(pairs, pairs_, 0);
      if (r < rows.count)
        std::memcpy(pairs, rows.query[r], args_.shape.head_dim * sizeof(uint16_t));
    }
    const int64_t vectors = divide_up(rows.most, kLanes);
    int64_t v = 0;
    for (; v + kTileVectors <= vectors; v += kTileVectors) score<kTileVectors>(v);
    for (; v < vectors; ++v) score<1>(v);
    find_references(rows, vectors);
    for (int64_t r = 0; r < kTileRows; ++r) weigh(rows, r, vectors);
    for (v = 0; v + kTileVectors <= vectors_; v += kTileVectors) add_values<kTileVectors>(rows, v);
    for (; v < vectors_; ++v) add_values<1>(rows, v);
  }

 private:
  KVSWAP_BF16 void lay_out_key(const uint16_t* key, uint32_t* to) const {
    const int64_t dim = args_.shape.head_dim;
    for (int64_t pair = 0; pair < pairs_; ++pair) to[pair * kLanes] = pair_of(key, pair, dim);
  }

  static uint32_t pair_of(const uint16_t* row, int64_t pair, int64_t dim) {
    if (row == nullptr) return 0;
    const uint32_t high = pair * 2 + 1 < dim ? row[pair * 2 + 1] : 0;
    return high << 16 | row[pair * 2];
  }

  /// The two tokens' numbers side by side.
  KVSWAP_BF16 void lay_out_values(const uint16_t* first, const uint16_t* second,
                                  uint32_t* to) const {
    for (int64_t v = 0; v < vectors_; ++v) {
      const int64_t left = std::min<int64_t>(kLanes, args_.shape.value_width() - v * kLanes);
      const auto there = static_cast<__mmask16>((1U << left) - 1);
      const auto words = [&](const uint16_t* row) KVSWAP_BF16 {
        return row == nullptr
                   ? _mm512_setzero_si512()
                   : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row + v * kLanes));
      };
      const __m512i pairs = _mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16));
      _mm512_store_si512(to + v * kLanes, pairs);
    }
  }

  template <int kVectors>
  KVSWAP_BF16 void score(int64_t vector) {
    __m512 sums[kTileRows][kVectors];
    multiply<kVectors>(query_, pairs_, keys_ + vector * pairs_ * kLanes, kLanes, pairs_ * kLanes,
                       pairs_, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        _mm512_store_ps(scores_ + r * kBlockTokens + (vector + v) * kLanes, sums[r][v]);
      }
    }
  }

  /// What weights are relative to: each row's largest exponent so far. Scores are capped, and what
  /// a row does not see becomes -inf, in place.
  KVSWAP_BF16 void find_references(SummaryEncoder& rows, int64_t vectors) {
    __m512 largest[kTileRows];
    for (auto& row : largest) row = _mm512_set1_ps(kNothing);
    for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const int64_t left = std::clamp<int64_t>(rows.seen[r] - v * kLanes, 0, kLanes);
        const auto there = static_cast<__mmask16>(counted_[v] & ((1U << left) - 1));
        float* at = scores_ + r * kBlockTokens + v * kLanes;
        __m512 score = _mm512_load_ps(at);
        if (is_capped() || there != 0xffff) {
          if (is_capped()) score = capped(score);
          score = _mm512_mask_blend_ps(there, _mm512_set1_ps(kNothing), score);
          _mm512_store_ps(at, score);
        }
        largest[r] = _mm512_max_ps(score, largest[r]);  // the second where the first is no number
      }
    }
    for (int r = 0; r < kTileRows; ++r) {
      chunk::refer(rows, r, _mm512_reduce_max_ps(largest[r]));
    }
  }

  /// A row's scores become its weights.
  KVSWAP_BF16 void weigh(SummaryEncoder& rows, int64_t r, int64_t vectors) {
    const float* scores = scores_ + r * kBlockTokens;
    auto* weights = reinterpret_cast<__m512i*>(weights_ + r * kBlockTokens);
    const __m512 base = _mm512_set1_ps(rows.base[r]);
    const __m512 factor = _mm512_set1_ps(factor_);
    const auto weights_of = [&](int64_t v) KVSWAP_BF16 {
      const __m512 score = _mm512_sub_ps(_mm512_load_ps(scores + v * kLanes), base);
      return power_of_two(_mm512_mul_ps(score, factor));
    };
    __m512 sums = _mm512_setzero_ps();
    for (int64_t v = 0; v < vectors; v += 2) {
      const __m512 low = weights_of(v);
      const __m512 high = v + 1 < vectors ? weights_of(v + 1) : _mm512_setzero_ps();
      sums = _mm512_add_ps(sums, _mm512_add_ps(low, high));
      weights[v / 2] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    chunk::settle(rows, r, factor_, _mm512_reduce_add_ps(sums));
  }

  bool is_capped() const { return args_.softcap > 0; }

  /// cap * tanh(scale * score / cap): tanh(a) = 1 - 2 / (e^(2a) + 1), in fp32 1 from 16 on.
  KVSWAP_BF16_INLINE __m512 capped(__m512 score) const {
    const __m512 most = _mm512_set1_ps(16.0f);
    const __m512 least = _mm512_set1_ps(-16.0f);
    __m512 near = _mm512_mul_ps(score, _mm512_set1_ps(args_.scale / args_.softcap));
    near =
        _mm512_max_ps(least, _mm512_min_ps(most, near));  // what is no number is second, and stays
    const __m512 grown = power_of_two(_mm512_mul_ps(near, _mm512_set1_ps(2 * kLog2e)));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 rest = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(grown, one));
    return _mm512_mul_ps(_mm512_sub_ps(one, rest), _mm512_set1_ps(args_.softcap));
  }

  template <int kVectors>
  KVSWAP_BF16 void add_values(const SummaryEncoder& rows, int64_t vector) {
    __m512 sums[kTileRows][kVectors];
    multiply<kVectors>(reinterpret_cast<const uint32_t*>(weights_), kBlockTokens / 2,
                       values_ + vector * kLanes, vectors_ * kLanes, kLanes,
                       divide_up(rows.most, 2), sums);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      if (r >= rows.count) continue;
      const __m512 old_share = _mm512_set1_ps(rows.old_share[r]);
      const __m512 new_share = _mm512_set1_ps(rows.new_share[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const int64_t d = (vector + v) * kLanes;
        const int64_t left = std::min<int64_t>(kLanes, args_.shape.value_width() - d);
        const auto there = static_cast<__mmask16>((1U << left) - 1);
        float* output = rows.output[r] + d;
        const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, output), old_share);
        _mm512_mask_storeu_ps(output, there, _mm512_fmadd_ps(sums[r][v], new_share, old));
      }
    }
  }

  const ChunkAttentionArgs& args_;
  int64_t pairs_;                          // of head_dim
  int64_t vectors_;                        // of a row of V
  float factor_;                           // from a score to its exponent of two
  __mmask16 counted_[kBlockVectors] = {};  // of the block, by vectors of tokens
  uint32_t* keys_ = nullptr;     // pairs of numbers: [vectors of tokens, pairs of head_dim, kLanes]
  uint32_t* values_ = nullptr;   // pairs of tokens: [pairs of tokens, a row of V in whole vectors]
  uint32_t* query_ = nullptr;    // pairs of numbers: [kTileRows, pairs of head_dim]
  float* scores_ = nullptr;      // [kTileRows, kBlockTokens]
  uint16_t* weights_ = nullptr;  // bf16 [kTileRows, kBlockTokens]
};

}  // namespace

void chunk_attention_by_pairs(const ChunkAttentionArgs& args, const Execution& execution) {
  chunk::attend_all<Attender>(args, execution);
}

}  // namespace kvswap

#else

#include <cstdlib>

namespace kvswap {

void chunk_attention_by_pairs(const ChunkAttentionArgs& /*args*/, const Execution& /*execution*/) {
  std::abort();
}

}  // namespace kvswap

#endif
