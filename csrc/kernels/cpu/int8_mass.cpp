#include "kernels/int8_mass.h"

#if defined(__x86_64__)
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cpu/vnni.h"

namespace kvswap {
namespace {

constexpr int kBlocks = kMassUnit / kSummaryBlock;       // of a unit
constexpr int64_t kStep = kInt8Columns * kSummaryBlock;  // bytes of four columns of a block
constexpr int kHeadsAtOnce = 4;                          // whose sums over a unit fill registers
constexpr float kOverflow = 0x1p60f;                     // weights above it lose what is small

/// 64 tokens of a summary, by tokens: byte c of token t of block b stands at [c / 4, b, t, c % 4].
/// Rows are raised by 128, since the product takes one side without sign.
struct Unit {
  const uint8_t* rows = nullptr;  // [ceil(rank / 4), kBlocks, 64]
  __m512 scales[kBlocks] = {};
  __mmask16 counted[kBlocks] = {};
  bool has_candidates() const { return (counted[0] | counted[1] | counted[2] | counted[3]) != 0; }
};

/// What is not there of the unit is zeros, and not counted.
KVSWAP_VNNI Unit read_unit(const Int8MassArgs& args, int64_t index, uint8_t* rows) {
  const __m512i order = by_tokens();
  const __m512i high = _mm512_set1_epi8(-128);
  Unit unit{.rows = rows};
  for (int b = 0; b < kBlocks; ++b) {
    const int64_t first = index * kMassUnit + b * kSummaryBlock;
    const int64_t block_bytes = first < args.tokens ? args.rank * kSummaryBlock : 0;
    const int8_t* source = args.summary + first * args.rank;
    for (int64_t step = 0; step < int8_stride(args.rank) / kInt8Columns; ++step) {
      const int64_t left = std::max<int64_t>(0, block_bytes - step * kStep);
      const __mmask64 there = left >= kStep ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      const __m512i columns = _mm512_maskz_loadu_epi8(there, source + step * kStep);
      _mm_prefetch(source + kMassUnit * args.rank + step * kStep, _MM_HINT_T0);
      const __m512i tokens = _mm512_maskz_permutexvar_epi8(~__mmask64{0}, order, columns);
      _mm512_store_si512(rows + (step * kBlocks + b) * kStep, _mm512_xor_si512(tokens, high));
    }
    const int64_t tokens = std::clamp<int64_t>(args.tokens - first, 0, kSummaryBlock);
    const auto there = static_cast<__mmask16>((1U << tokens) - 1);
    unit.scales[b] = _mm512_maskz_loadu_ps(there, args.token_scale + first);
    unit.counted[b] = static_cast<__mmask16>(args.counted[index] >> (b * kSummaryBlock)) & there;
  }
  return unit;
}

/// sums[q][b]: the products of a unit's rows with kHeads queries, in registers.
template <int kHeads>
KVSWAP_VNNI_INLINE void multiply(const Unit& unit, const int8_t* query, int64_t stride,
                                 const int32_t* raised, __m512i (&sums)[kHeads][kBlocks]) {
#pragma GCC unroll 16
  for (int q = 0; q < kHeads; ++q) {
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; ++b) sums[q][b] = _mm512_set1_epi32(-raised[q]);
  }
  for (int64_t step = 0; step < stride / kInt8Columns; ++step) {
    const uint8_t* rows = unit.rows + step * kBlocks * kStep;
#pragma GCC unroll 16
    for (int q = 0; q < kHeads; ++q) {
      int32_t four;
      std::memcpy(&four, query + q * stride + step * kInt8Columns, sizeof(four));
      const __m512i columns = _mm512_set1_epi32(four);
#pragma GCC unroll 16
      for (int b = 0; b < kBlocks; ++b) {
        sums[q][b] = _mm512_dpbusd_epi32(sums[q][b], _mm512_load_si512(rows + b * kStep), columns);
      }
    }
  }
}

/// 2^a for a >= -126; 0 where not counted.
KVSWAP_VNNI_INLINE __m512 power_of_two(__m512 a, __mmask16 counted) {
  const __m512 fraction = _mm512_maskz_reduce_ps(0xffff, a, _MM_FROUND_TO_NEG_INF);
  __m512 value = _mm512_set1_ps(0.013534167781472206f);
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.052011460065841675f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.2414427548646927f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(0.6930038332939148f));
  value = _mm512_fmadd_ps(value, fraction, _mm512_set1_ps(1.0000026226043701f));
  return _mm512_maskz_scalef_ps(counted, value, a);
}

/// Sums of neighbours: first of a, then of b.
KVSWAP_VNNI_INLINE __m512 add_pairs(__m512 a, __m512 b) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

/// The weights of 64 tokens as sums of groups, stored; returns them summed by lanes.
KVSWAP_VNNI_INLINE __m512 store_groups(const __m512* weights, int64_t group_tokens, float* target) {
  const __m512 low = add_pairs(weights[0], weights[1]);
  const __m512 high = add_pairs(weights[2], weights[3]);
  __m512 groups = add_pairs(low, high);
  if (group_tokens == 1) {
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(target + b * 16, weights[b]);
  } else if (group_tokens == 2) {
    _mm512_storeu_ps(target, low);
    _mm512_storeu_ps(target + 16, high);
  } else {
    const __m512 of_four = groups;
    for (int64_t size = 4; size < group_tokens; size *= 2) groups = add_pairs(groups, groups);
    _mm512_mask_storeu_ps(target, static_cast<__mmask16>((1U << (kMassUnit / group_tokens)) - 1),
                          groups);
    return of_four;
  }
  return groups;
}

class Weigher {
 public:
  KVSWAP_VNNI explicit Weigher(const Int8MassArgs& args)
      : args_(args), stride_(int8_stride(args.rank)) {
    thread_local std::vector<float> scratch;  // sums by lanes, raised queries, a unit's rows
    const size_t size = args.heads * 17 + stride_ * kMassUnit / 4 + 32;
    if (scratch.size() < size) scratch.resize(size);
    const auto unaligned = std::bit_cast<uintptr_t>(scratch.data());
    totals_ = scratch.data() + (64 - unaligned % 64) % 64 / sizeof(float);
    rows_ = reinterpret_cast<uint8_t*>(totals_ + args.heads * 16);
    raised_ = reinterpret_cast<int32_t*>(rows_ + stride_ * kMassUnit);
    std::fill_n(totals_, args.heads * 16, 0.0f);
    for (int64_t q = 0; q < args.heads; ++q) {
      int32_t sum = 0;
      for (int64_t r = 0; r < stride_; ++r) sum += args.query[q * stride_ + r];
      raised_[q] = 128 * sum;
    }
  }

  KVSWAP_VNNI bool run() {
    const int64_t units = (args_.tokens + kMassUnit - 1) / kMassUnit;
    bool is_begun = false;
    for (int64_t index = 0; index < units; ++index) {
      const Unit unit = read_unit(args_, index, rows_);
      if (!is_begun && unit.has_candidates()) {
        each_heads([&]<int kHeads>(int64_t head) KVSWAP_VNNI { set_largest<kHeads>(unit, head); });
        is_begun = true;
      }
      const int64_t group = index * kMassUnit / args_.group_tokens;
      each_heads([&]<int kHeads>(int64_t head) KVSWAP_VNNI { weigh<kHeads>(unit, head, group); });
    }
    bool is_number = true;
    for (int64_t head = 0; head < args_.heads; ++head) {
      args_.sums[head] = std::accumulate(totals_ + head * 16, totals_ + head * 16 + 16, 0.0f);
      if (!is_begun) args_.largest[head] = -std::numeric_limits<float>::infinity();
      is_number = is_number && args_.sums[head] < kOverflow &&
                  (!is_begun || std::isfinite(args_.largest[head]));
    }
    return is_number;
  }

 private:
  template <typename Body>
  KVSWAP_VNNI_INLINE void each_heads(const Body& body) {
    int64_t head = 0;
    for (; head + kHeadsAtOnce <= args_.heads; head += kHeadsAtOnce) {
      body.template operator()<kHeadsAtOnce>(head);
    }
    for (; head < args_.heads; ++head) body.template operator()<1>(head);
  }

  template <int kHeads>
  KVSWAP_VNNI void set_largest(const Unit& unit, int64_t head) {
    __m512i sums[kHeads][kBlocks];
    multiply<kHeads>(unit, args_.query + head * stride_, stride_, raised_ + head, sums);
    for (int q = 0; q < kHeads; ++q) {
      const __m512 factor = _mm512_set1_ps(args_.factors[head + q]);
      __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
      for (int b = 0; b < kBlocks; ++b) {
        const __m512 own =
            _mm512_mul_ps(_mm512_mul_ps(as_floats(sums[q][b]), unit.scales[b]), factor);
        largest = _mm512_mask_max_ps(largest, unit.counted[b], largest, own);
      }
      alignas(64) float lanes[16];
      _mm512_store_ps(lanes, largest);
      args_.largest[head + q] = *std::max_element(lanes, lanes + 16);
    }
  }

  template <int kHeads>
  KVSWAP_VNNI void weigh(const Unit& unit, int64_t head, int64_t group) {
    __m512i sums[kHeads][kBlocks];
    multiply<kHeads>(unit, args_.query + head * stride_, stride_, raised_ + head, sums);
    const __m512 far_below = _mm512_set1_ps(-126.0f);
#pragma GCC unroll 16
    for (int q = 0; q < kHeads; ++q) {
      const __m512 factor = _mm512_set1_ps(args_.factors[head + q]);
      const __m512 largest = _mm512_set1_ps(args_.largest[head + q]);
      __m512 weights[kBlocks];
#pragma GCC unroll 16
      for (int b = 0; b < kBlocks; ++b) {
        const __m512 own =
            _mm512_fmsub_ps(_mm512_mul_ps(as_floats(sums[q][b]), unit.scales[b]), factor, largest);
        weights[b] = power_of_two(_mm512_maskz_max_ps(0xffff, own, far_below), unit.counted[b]);
      }
      float* target = args_.weights + (head + q) * args_.weight_stride + group;
      float* total = totals_ + (head + q) * 16;
      _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total),
                                           store_groups(weights, args_.group_tokens, target)));
    }
  }

  const Int8MassArgs& args_;
  int64_t stride_;
  float* totals_ = nullptr;    // [heads, 16]: of the weights, by lanes
  uint8_t* rows_ = nullptr;    // of the unit
  int32_t* raised_ = nullptr;  // [heads]: 128 times the sum of the query
};

}  // namespace

bool int8_mass(const Int8MassArgs& args) {
  if (!has_vnni() || args.group_tokens > kMassUnit ||
      !std::has_single_bit(static_cast<uint64_t>(args.group_tokens))) {
    return false;
  }
  bool is_number = true;
  for (int64_t t = 0; t < args.tokens; ++t) is_number &= std::isfinite(args.token_scale[t]);
  return is_number && Weigher(args).run();
}

}  // namespace kvswap

#else

namespace kvswap {

bool int8_mass(const Int8MassArgs&) { return false; }

}  // namespace kvswap

#endif
