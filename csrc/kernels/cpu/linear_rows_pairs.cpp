#include "kernels/cpu/linear_rows_pairs.h"

#include "kernels/cpu/bf16_pairs.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/cpu/element.h"

// g++ 12 takes what its own intrinsics leave undefined on purpose for a fault.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvswap {
namespace {

constexpr int64_t kNumbers = 32;  // bf16 of a vector
constexpr int kTileOutputs = 4;
constexpr int kTileRows = 4;  // with kTileOutputs, sums for half of 32 registers

/// sums[o][r] += weight[o] input[r], of up to 32 numbers.
template <int kOutputs, int kRows, typename Load>
KVSWAP_BF16_INLINE void add(const BFloat16* weight, const BFloat16* input, int64_t stride,
                            const Load& load, __m512 (&sums)[kOutputs][kRows]) {
  __m512i parts[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) parts[r] = load(input + r * stride);
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) {
    const __m512i weights = load(weight + o * stride);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums[o][r] = _mm512_dpbf16_ps(sums[o][r], (__m512bh)weights, (__m512bh)parts[r]);
    }
  }
}

struct Whole {
  KVSWAP_BF16_INLINE __m512i operator()(const BFloat16* source) const {
    return _mm512_loadu_si512(source);
  }
};

struct Some {
  __mmask32 there;
  KVSWAP_BF16_INLINE __m512i operator()(const BFloat16* source) const {
    return _mm512_maskz_loadu_epi16(there, source);
  }
};

/// As linear_rows.cpp's, 32 numbers at a time.
template <int kOutputs, int kRows>
KVSWAP_BF16 void multiply(const LinearRowsArgs& args, int64_t output, int64_t row) {
  const auto* weight = static_cast<const BFloat16*>(args.weight) + output * args.inputs;
  const auto* input = static_cast<const BFloat16*>(args.input) + row * args.inputs;
  __m512 sums[kOutputs][kRows];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[o][r] = _mm512_setzero_ps();
  }
  const BFloat16* ahead = row == 0 ? weight + kOutputs * args.inputs : weight;
  int64_t at = 0;
  for (; at + kNumbers <= args.inputs; at += kNumbers) {
    fetch_ahead<kOutputs * kNumbers * sizeof(BFloat16)>(ahead + kOutputs * at);
    add(weight + at, input + at, args.inputs, Whole{}, sums);
  }
  if (const int64_t left = args.inputs - at; left > 0) {
    add(weight + at, input + at, args.inputs, Some{(1U << left) - 1}, sums);
  }
  const auto* bias = static_cast<const BFloat16*>(args.bias);
  for (int o = 0; o < kOutputs; ++o) {
    const float added = bias == nullptr ? 0.0f : to_float(bias[output + o]);
    for (int r = 0; r < kRows; ++r) {
      static_cast<BFloat16*>(args.output)[(row + r) * args.outputs + output + o] =
          from_float<BFloat16>(_mm512_reduce_add_ps(sums[o][r]) + added);
    }
  }
}

template <int kOutputs>
KVSWAP_BF16 void multiply_rows(const LinearRowsArgs& args, int64_t output) {
  int64_t row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows) {
    multiply<kOutputs, kTileRows>(args, output, row);
  }
  for (; row + 2 <= args.rows; row += 2) multiply<kOutputs, 2>(args, output, row);
  for (; row < args.rows; ++row) multiply<kOutputs, 1>(args, output, row);
}

}  // namespace

void linear_outputs_by_pairs(const LinearRowsArgs& args, int64_t begin, int64_t end) {
  int64_t output = begin;
  for (; output + kTileOutputs <= end; output += kTileOutputs) {
    multiply_rows<kTileOutputs>(args, output);
  }
  for (; output < end; ++output) multiply_rows<1>(args, output);
}

}  // namespace kvswap

#else

#include <cstdlib>

namespace kvswap {

void linear_outputs_by_pairs(const LinearRowsArgs& /*args*/, int64_t /*begin*/, int64_t /*end*/) {
  std::abort();
}

}  // namespace kvswap

#endif
