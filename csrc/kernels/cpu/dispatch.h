#pragma once

// Chooses a kernel's variant at run time. Only Highway's headers are used, not its library.

#include "kernels/cpu/targets.h"

namespace kvswap {

/// Instruction sets in rising order; which of them are compiled depends on the architecture.
enum class SimdLevel : int { kBaseline, kAvx2, kAvx512, kCount };

/// The level in use, see cpu_features.h.
SimdLevel active_simd_level();

}  // namespace kvswap

#if KVSWAP_HAS_HIGHWAY

#define KVSWAP_EXPORT(function)                                                    \
  static constexpr decltype(&HWY_STATIC_DISPATCH(function)) function##_table[] = { \
      &HWY_STATIC_DISPATCH(function), HWY_CHOOSE_AVX2(function), HWY_CHOOSE_AVX3(function)}

#else

#define KVSWAP_EXPORT(function) \
  static constexpr decltype(&N_SCALAR::function) function##_table[] = {&N_SCALAR::function}

#endif

#define KVSWAP_DISPATCH(function) \
  (*function##_table[static_cast<int>(::kvswap::active_simd_level())])
