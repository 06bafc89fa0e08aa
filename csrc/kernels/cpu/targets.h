// No include guard: Highway's headers have their own, one for each instruction set.
//
// Compiles the including file once for each instruction set. Before this header, a kernel's file
// defines HWY_TARGET_INCLUDE as its own path; its code stands between HWY_BEFORE_NAMESPACE and
// HWY_AFTER_NAMESPACE in kvswap::HWY_NAMESPACE, on the vectors of simd-inl.h. No file that ends in
// -inl.h may come before this header (or dispatch.h).
//
// Without Highway there is one instruction set, whose vectors have one lane.

#if KVSWAP_HAS_HIGHWAY

// AVX2, AVX-512, NEON and one lane. SVE's vectors cannot stand in arrays.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#else

#define HWY_ONCE 1
#define HWY_NAMESPACE N_SCALAR
#define HWY_BEFORE_NAMESPACE() static_assert(true)
#define HWY_AFTER_NAMESPACE() static_assert(true)
#define HWY_ATTR

#endif
