#pragma once

// What kernels by products of pairs of bf16 share (AVX-512 BF16).

#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/cpu_features.h"

#define KVSWAP_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define KVSWAP_BF16_INLINE KVSWAP_BF16 __attribute__((always_inline)) inline

namespace kvswap {

/// Whether the CPU has such products, and their level is in use.
inline bool has_bf16_pairs() {
  static const bool is_here =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
  return is_here && simd_level() == "AVX3";
}

}  // namespace kvswap

#else

namespace kvswap {

inline bool has_bf16_pairs() { return false; }

}  // namespace kvswap

#endif
