#include "kernels/chunk_attention.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <vector>

#include "kernels/cpu_features.h"

// g++ 12 takes what its own intrinsics leave undefined on purpose for a fault.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvswap {
namespace {

#define KVSWAP_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define KVSWAP_BF16_INLINE KVSWAP_BF16 __attribute__((always_inline)) inline

constexpr int kLanes = 16;         // fp32 of a vector, and pairs of bf16
constexpr int kTileRows = 6;       // rows of a tile: with kTileVectors, sums for 24 registers
constexpr int kTileVectors = 4;    // of 32, beside the vectors and the row that they meet
constexpr int kBlockTokens = 256;  // of which K and V fill half of a small L2, scores of a tile L1
constexpr int kBlockVectors = kBlockTokens / kLanes;
constexpr int64_t kPieceRows = 1024;  // at least, so that what is laid out anew for it is little
constexpr int64_t kPiecesMax = 8;     // of a KV head
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr auto kLog2e = std::numbers::log2e_v<float>;

constexpr int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

/// A block of tokens of one KV head, as products take them.
struct Block {
  int64_t tokens = 0;
  int64_t position = 0;                   // of the first
  __mmask16 counted[kBlockVectors] = {};  // by vectors of tokens
  uint32_t* keys = nullptr;    // pairs of numbers: [vectors of tokens, pairs of head_dim, kLanes]
  uint32_t* values = nullptr;  // pairs of tokens: [pairs of tokens, head_dim in whole vectors]
};

/// Rows of queries and what they come to: a row is one query of one head.
struct Tile {
  int64_t rows = 0;          // that are there of kTileRows
  float* output[kTileRows];  // [head_dim]
  float* log_sum_exp[kTileRows];
  int64_t seen[kTileRows];      // tokens of the block, the first ones
  float before[kTileRows];      // log2 of what was attended before the block, then its weight
  float reference[kTileRows];   // exponent that weights are relative to
  float share[kTileRows];       // 1 / all weights
  uint32_t* query = nullptr;    // pairs of numbers: [kTileRows, pairs of head_dim]
  float* scores = nullptr;      // [kTileRows, kBlockTokens]
  uint16_t* weights = nullptr;  // bf16 [kTileRows, kBlockTokens]
};

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
        heads_(args.heads / args.shape.kv_heads),
        pairs_(divide_up(args.shape.head_dim, 2)),
        vectors_(divide_up(args.shape.head_dim, kLanes)),
        factor_(is_capped() ? kLog2e : args.scale * kLog2e) {
    const int64_t query = divide_up(kTileRows * pairs_, kLanes) * kLanes;
    const int64_t words = kBlockTokens * pairs_ + kBlockTokens / 2 * vectors_ * kLanes + query +
                          kTileRows * kBlockTokens * 3 / 2;
    thread_local std::vector<uint32_t> scratch;
    if (static_cast<int64_t>(scratch.size()) < words + kLanes) scratch.resize(words + kLanes);
    const auto unaligned = std::bit_cast<uintptr_t>(scratch.data());
    block_.keys = scratch.data() + (64 - unaligned % 64) % 64 / sizeof(uint32_t);
    block_.values = block_.keys + kBlockTokens * pairs_;
    tile_.query = block_.values + kBlockTokens / 2 * vectors_ * kLanes;
    tile_.scores = reinterpret_cast<float*>(tile_.query + query);
    tile_.weights = reinterpret_cast<uint16_t*>(tile_.scores + kTileRows * kBlockTokens);
  }

  /// Every `pieces`-th tile of a KV head from `piece` on: causal rows are then alike for all.
  KVSWAP_BF16 void attend(int64_t kv_head, int64_t piece, int64_t pieces) {
    const int64_t rows = args_.queries * heads_;
    const int64_t newest = args_.query_position + args_.queries - 1;
    for (int64_t first = 0; first < args_.tokens; first += kBlockTokens) {
      if (args_.position + first > newest) return;
      lay_out(kv_head, first);
      for (int64_t tile = piece; tile * kTileRows < rows; tile += pieces) {
        const int64_t most = set_rows(kv_head, tile * kTileRows);
        if (most > 0) attend_tile(most);
      }
    }
  }

 private:
  /// K (side 0) or V of a token, or null where it is padding.
  const uint16_t* token(int64_t kv_head, int64_t side, int64_t t) const {
    if (args_.valid != nullptr && args_.valid[t] == 0) return nullptr;
    const RecordShape& shape = args_.shape;
    if (args_.records != nullptr) {
      const int64_t slot = (kv_head * 2 + side) * shape.group_tokens + t % shape.group_tokens;
      return static_cast<const uint16_t*>(args_.records[t / shape.group_tokens]) +
             slot * shape.head_dim;
    }
    const TokenView& view = args_.view;
    return side == 0 ? static_cast<const uint16_t*>(view.keys) + kv_head * view.key_head_stride +
                           t * view.key_token_stride
                     : static_cast<const uint16_t*>(view.values) +
                           kv_head * view.value_head_stride + t * view.value_token_stride;
  }

  /// Tokens from `first` on; what is padding, or not there, as zeros that do not count.
  KVSWAP_BF16 void lay_out(int64_t kv_head, int64_t first) {
    block_.tokens = std::min<int64_t>(kBlockTokens, args_.tokens - first);
    block_.position = args_.position + first;
    std::fill_n(block_.counted, kBlockVectors, __mmask16{0});
    for (int64_t t = 0; t < divide_up(block_.tokens, kLanes) * kLanes; ++t) {
      const bool is_there = t < block_.tokens;
      const uint16_t* key = is_there ? token(kv_head, 0, first + t) : nullptr;
      uint32_t* to = block_.keys + t / kLanes * pairs_ * kLanes + t % kLanes;
      lay_out_key(key, to);
      if (key != nullptr) block_.counted[t / kLanes] |= static_cast<__mmask16>(1U << (t % kLanes));
    }
    for (int64_t t = 0; t < block_.tokens; t += 2) {
      const bool is_pair = t + 1 < block_.tokens;
      lay_out_values(token(kv_head, 1, first + t),
                     is_pair ? token(kv_head, 1, first + t + 1) : nullptr,
                     block_.values + t / 2 * vectors_ * kLanes);
    }
  }

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
      const int64_t left = std::min<int64_t>(kLanes, args_.shape.head_dim - v * kLanes);
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

  /// The tile from `row` on; returns how many of the block's tokens its rows see at most.
  KVSWAP_BF16 int64_t set_rows(int64_t kv_head, int64_t row) {
    const int64_t dim = args_.shape.head_dim;
    tile_.rows = std::min<int64_t>(kTileRows, args_.queries * heads_ - row);
    int64_t most = 0;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const int64_t query = (row + r) / heads_;
      const int64_t head = kv_head * heads_ + (row + r) % heads_;
      const int64_t to = query * args_.heads + head;
      tile_.output[r] = args_.output + to * dim;
      tile_.log_sum_exp[r] = args_.log_sum_exp + to;
      tile_.seen[r] =
          std::clamp<int64_t>(args_.query_position + query - block_.position + 1, 0, block_.tokens);
      tile_.before[r] = args_.log_sum_exp[to] * kLog2e;
      most = std::max(most, tile_.seen[r]);
      const auto* numbers = static_cast<const uint16_t*>(args_.query) +
                            head * args_.query_head_stride + query * args_.query_token_stride;
      uint32_t* pairs = tile_.query + r * pairs_;
      pairs[pairs_ - 1] = 0;
      std::memcpy(pairs, numbers, dim * sizeof(uint16_t));
    }
    std::fill(tile_.query + tile_.rows * pairs_, tile_.query + kTileRows * pairs_, 0);
    std::fill(tile_.seen + tile_.rows, tile_.seen + kTileRows, 0);
    std::fill(tile_.before + tile_.rows, tile_.before + kTileRows, kNothing);
    return most;
  }

  KVSWAP_BF16 void attend_tile(int64_t most) {
    const int64_t vectors = divide_up(most, kLanes);
    int64_t v = 0;
    for (; v + kTileVectors <= vectors; v += kTileVectors) score<kTileVectors>(v);
    for (; v < vectors; ++v) score<1>(v);
    find_references(vectors);
    for (int64_t r = 0; r < kTileRows; ++r) weigh(r, vectors);
    for (v = 0; v + kTileVectors <= vectors_; v += kTileVectors) add_values<kTileVectors>(v, most);
    for (; v < vectors_; ++v) add_values<1>(v, most);
  }

  template <int kVectors>
  KVSWAP_BF16 void score(int64_t vector) {
    __m512 sums[kTileRows][kVectors];
    multiply<kVectors>(tile_.query, pairs_, block_.keys + vector * pairs_ * kLanes, kLanes,
                       pairs_ * kLanes, pairs_, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        _mm512_store_ps(tile_.scores + r * kBlockTokens + (vector + v) * kLanes, sums[r][v]);
      }
    }
  }

  /// What weights are relative to: each row's largest exponent so far. Scores are capped, and what
  /// a row does not see becomes -inf, in place.
  KVSWAP_BF16 void find_references(int64_t vectors) {
    __m512 largest[kTileRows];
    for (auto& row : largest) row = _mm512_set1_ps(kNothing);
    for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const int64_t left = std::clamp<int64_t>(tile_.seen[r] - v * kLanes, 0, kLanes);
        const auto there = static_cast<__mmask16>(block_.counted[v] & ((1U << left) - 1));
        float* at = tile_.scores + r * kBlockTokens + v * kLanes;
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
      const float so_far = std::max(tile_.before[r], factor_ * _mm512_reduce_max_ps(largest[r]));
      tile_.reference[r] = so_far == kNothing ? 0.0f : so_far;
    }
  }

  /// A row's scores become its weights.
  KVSWAP_BF16 void weigh(int64_t r, int64_t vectors) {
    const float* scores = tile_.scores + r * kBlockTokens;
    auto* weights = reinterpret_cast<__m512i*>(tile_.weights + r * kBlockTokens);
    const float reference = tile_.reference[r];
    const auto weights_of = [&](int64_t v) KVSWAP_BF16 {
      return power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + v * kLanes),
                                          _mm512_set1_ps(factor_), _mm512_set1_ps(reference)));
    };
    __m512 sums = _mm512_setzero_ps();
    for (int64_t v = 0; v < vectors; v += 2) {
      const __m512 low = weights_of(v);
      const __m512 high = v + 1 < vectors ? weights_of(v + 1) : _mm512_setzero_ps();
      sums = _mm512_add_ps(sums, _mm512_add_ps(low, high));
      weights[v / 2] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    const float added = _mm512_reduce_add_ps(sums);
    const float kept = std::exp2(tile_.before[r] - reference);
    const bool is_nothing = added == 0.0f;
    tile_.before[r] = is_nothing ? 1.0f : kept;
    tile_.share[r] = is_nothing ? 1.0f : 1.0f / (kept + added);
    if (!is_nothing) *tile_.log_sum_exp[r] = (reference + std::log2(kept + added)) / kLog2e;
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
  KVSWAP_BF16 void add_values(int64_t vector, int64_t most) {
    __m512 sums[kTileRows][kVectors];
    multiply<kVectors>(reinterpret_cast<const uint32_t*>(tile_.weights), kBlockTokens / 2,
                       block_.values + vector * kLanes, vectors_ * kLanes, kLanes,
                       divide_up(most, 2), sums);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      if (r >= tile_.rows) continue;
      const __m512 before = _mm512_set1_ps(tile_.before[r]);
      const __m512 share = _mm512_set1_ps(tile_.share[r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const int64_t d = (vector + v) * kLanes;
        const int64_t left = std::min<int64_t>(kLanes, args_.shape.head_dim - d);
        const auto there = static_cast<__mmask16>((1U << left) - 1);
        float* output = tile_.output[r] + d;
        const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, output), before);
        _mm512_mask_storeu_ps(output, there, _mm512_mul_ps(_mm512_add_ps(old, sums[r][v]), share));
      }
    }
  }

  const ChunkAttentionArgs& args_;
  int64_t heads_;    // of a KV head
  int64_t pairs_;    // of head_dim
  int64_t vectors_;  // of head_dim
  float factor_;     // from a score to its exponent of two
  Block block_;
  Tile tile_;
};

}  // namespace

bool has_chunk_attention() {
  static const bool is_here =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
  return is_here && simd_level() == "AVX3";
}

bool has_bf16_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1U << 22;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0;
}

void chunk_attention(const ChunkAttentionArgs& args, const Execution& execution) {
  const int64_t rows = args.queries * (args.heads / args.shape.kv_heads);
  const int64_t pieces = std::clamp<int64_t>(rows / kPieceRows, 1, kPiecesMax);
  run_parallel(execution, args.shape.kv_heads * pieces, 1, [&](int64_t begin, int64_t end) {
    Attender attender(args);
    for (int64_t i = begin; i < end; ++i) attender.attend(i / pieces, i % pieces, pieces);
  });
}

}  // namespace kvswap

#else

#include <cstdlib>

namespace kvswap {

bool has_chunk_attention() { return false; }
bool has_bf16_tiles() { return false; }
void chunk_attention(const ChunkAttentionArgs& /*args*/, const Execution& /*execution*/) {
  std::abort();
}

}  // namespace kvswap

#endif
