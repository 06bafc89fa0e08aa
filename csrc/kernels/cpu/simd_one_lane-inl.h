// One lane: the portable variant, and the reference for the others. See simd-inl.h.
#include <algorithm>
#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

using Floats = float;
inline constexpr int64_t kLanes = 1;
inline constexpr int kRegisters = 16;

template <typename T>
inline Floats load(const T* source) {
  return to_float(*source);
}

template <typename T>
inline void load_two(const T* source, Floats& one, Floats& other) {
  one = load(source);
  other = load(source + 1);
}

inline void load_pair(const Int4Pair* source, Floats& low, Floats& high) {
  low = low_half(*source);
  high = high_half(*source);
}

template <typename T>
inline void store(Floats value, T* target) {
  *target = from_float<T>(value);
}

inline void store(Floats value, int8_t* target) {
  *target = static_cast<int8_t>(std::nearbyint(value));
}

inline Floats zeros() { return 0.0f; }
inline Floats fill(float value) { return value; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats maximum(Floats a, Floats b) { return std::max(a, b); }
inline Floats magnitude(Floats a) { return std::fabs(a); }
inline Floats exponential(Floats a) { return std::exp(a); }
inline Floats power_of_two(Floats a) { return std::exp2(a); }
inline Floats nan_to(Floats a, float substitute) { return a != a ? substitute : a; }
inline Floats keep_nan(Floats from, Floats a) { return from == from ? a : from; }
inline Floats pairwise_max(Floats a, Floats b) { return std::max(a, b); }
inline Floats pairwise_add(Floats a, Floats b) { return a + b; }
inline Floats where_greater(Floats a, Floats b, Floats yes, Floats no) { return a > b ? yes : no; }

/// Bit i is set where lane i of `a` is greater than lane i of `b`.
inline uint64_t greater_bits(Floats a, Floats b) { return a > b; }

inline float sum(Floats a) { return a; }
inline float largest(Floats a) { return a; }

/// target[i] = sum(values[i])
inline void sum4(const Floats* values, float* target) { std::copy_n(values, 4, target); }

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
