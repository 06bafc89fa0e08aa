#pragma once

#include "kernels/cpu/element.h"

/// Stand-in for the toolkit's header: what csrc/kernels/cuda/element.cuh takes from it.
struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return kvswap::to_float(kvswap::Float16{value.bits}); }
inline __half __float2half_rn(float value) {
  return {kvswap::from_float<kvswap::Float16>(value).bits};
}
