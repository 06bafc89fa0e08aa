#pragma once

// What kernels over rows of whole numbers share: products of four bytes at once (AVX-512 VNNI).

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu_features.h"

#define KVSWAP_VNNI \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")))
#define KVSWAP_VNNI_INLINE KVSWAP_VNNI __attribute__((always_inline)) inline

namespace kvswap {

inline bool has_vnni() {
  static const bool is_here = __builtin_cpu_supports("avx512vnni") &&
                              __builtin_cpu_supports("avx512vbmi") &&
                              __builtin_cpu_supports("avx512bw");
  return is_here && simd_level() == "AVX3";
}

/// Byte 4 t + c of the result is byte 16 c + t: what stands by columns then stands by tokens.
KVSWAP_VNNI_INLINE __m512i by_tokens() {
  alignas(64) uint8_t from[64];
  for (int i = 0; i < 64; ++i) from[i] = static_cast<uint8_t>(i % 4 * 16 + i / 4);
  return _mm512_load_si512(from);
}

KVSWAP_VNNI_INLINE __m512 as_floats(__m512i sums) { return _mm512_maskz_cvtepi32_ps(0xffff, sums); }

}  // namespace kvswap
