// The vectors that kernels are written in: fp32 lanes, whatever the elements in memory are.
//
//   Floats, kLanes             a vector and its width
//   load, store                convert from and to float, BFloat16, Float16, int8_t and Float8
//   load_two                   2 kLanes elements, in an order of their type's own
//   load_pair                  two columns of int4 rows
//   load_some, store_some      the same for fewer than kLanes elements; the rest is zero
//   sum4                       the sums of four vectors, side by side
//   pairwise_max, pairwise_add of two vectors' neighbouring lanes, in order
//   power_of_two               2^a, within 3e-7 of it
//   where_greater              yes where a > b, else no: lane by lane
//   with_float_type            a body for the type of elements that a DType names
// Included once for each instruction set (see targets.h), hence the guard that toggles.
#if defined(KVSWAP_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSWAP_SIMD_INL_H_
#undef KVSWAP_SIMD_INL_H_
#else
#define KVSWAP_SIMD_INL_H_
#endif

#include <cstring>

#include "kernels/cpu/element.h"
#include "kernels/cpu/targets.h"

// Before each loop over an array of vectors: the array stays in registers only where its loops are
// gone early.
#undef KVSWAP_UNROLL
#if defined(__clang__)
#define KVSWAP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVSWAP_UNROLL _Pragma("GCC unroll 16")
#endif

#if !KVSWAP_HAS_HIGHWAY || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#include "kernels/cpu/simd_one_lane-inl.h"
#else
#include "kernels/cpu/simd_highway-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// Calls body<T>() with the floating-point type that `dtype` names; nothing for int8 and int4.
template <typename Body>
void with_float_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body.template operator()<float>();
    case DType::kBFloat16:
      return body.template operator()<BFloat16>();
    case DType::kFloat16:
      return body.template operator()<Float16>();
    case DType::kInt8:
    case DType::kInt4:
      return;
  }
}

template <typename T>
inline Floats load_some(const T* source, int64_t count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, source, count * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store_some(Floats value, T* target, int64_t count) {
  T lanes[kLanes];
  store(value, lanes);
  std::memcpy(target, lanes, count * sizeof(T));
}

constexpr int64_t round_up_to_lanes(int64_t count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSWAP_SIMD_INL_H_
