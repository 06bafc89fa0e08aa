#pragma once

#include "kernels/cpu/element.h"

/// Stand-in for the toolkit's header: what csrc/kernels/cuda/element.cuh takes from it.
struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {kvswap::from_float<kvswap::BFloat16>(value).bits};
}
