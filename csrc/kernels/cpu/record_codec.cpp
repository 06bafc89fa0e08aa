#include "kernels/record_codec.h"

#include <limits>

#include "kernels/float8_exponent.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/record_codec.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr float kRecordMax = 448.0f;

inline Floats finite_magnitude(Floats value) {
  const Floats size = magnitude(value);
  return where_greater(fill(std::numeric_limits<float>::infinity()), size, size, zeros());
}

template <typename T>
float largest_finite(const T* values, int64_t count) {
  Floats found = zeros();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    found = maximum(found, finite_magnitude(load(values + i)));
  }
  if (i < count) found = maximum(found, finite_magnitude(load_some(values + i, count - i)));
  return largest(found);
}

/// To at most 448 where it is finite; infinities and NaN stay.
inline Floats saturated(Floats value) {
  const Floats infinite = fill(std::numeric_limits<float>::infinity());
  const Floats lowest = fill(-std::numeric_limits<float>::infinity());
  const Floats most = fill(kRecordMax);
  const Floats least = fill(-kRecordMax);
  const Floats below =
      where_greater(value, most, where_greater(infinite, value, most, value), value);
  return where_greater(least, below, where_greater(below, lowest, least, below), below);
}

template <typename T>
void encode_side(const T* source, Float8* target, int8_t* exponent, DType dtype, int64_t count) {
  *exponent = float8_exponent(largest_finite(source, count), dtype);
  const Floats factor = fill(power_of_exponent(static_cast<int8_t>(-*exponent)));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(saturated(multiply(load(source + i), factor)), target + i);
  }
  if (i < count) {
    store_some(saturated(multiply(load_some(source + i, count - i), factor)), target + i,
               count - i);
  }
}

template <typename T>
void decode_side(const Float8* source, T* target, int8_t exponent, int64_t count) {
  const Floats factor = fill(power_of_exponent(exponent));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(multiply(load(source + i), factor), target + i);
  }
  if (i < count) {
    store_some(multiply(load_some(source + i, count - i), factor), target + i, count - i);
  }
}

/// Sides are (record * kv_heads + KV head) * 2, K before V.
template <typename T>
void encode_typed(const RecordCodecArgs& args, int64_t begin, int64_t end) {
  const int64_t of_record = args.shape.kv_heads * 2;
  const int64_t count = args.shape.group_tokens * args.shape.head_dim;
  for (int64_t side = begin; side < end; ++side) {
    const int64_t offset = side % of_record * count;
    encode_side(static_cast<const T*>(args.from[side / of_record]) + offset,
                static_cast<Float8*>(args.to[side / of_record]) + offset, args.exponents + side,
                args.dtype, count);
  }
}

template <typename T>
void decode_typed(const RecordCodecArgs& args, int64_t begin, int64_t end) {
  const int64_t of_record = args.shape.kv_heads * 2;
  const int64_t count = args.shape.group_tokens * args.shape.head_dim;
  for (int64_t side = begin; side < end; ++side) {
    const int64_t offset = side % of_record * count;
    decode_side(static_cast<const Float8*>(args.from[side / of_record]) + offset,
                static_cast<T*>(args.to[side / of_record]) + offset, args.exponents[side], count);
  }
}

void encode_sides(const RecordCodecArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { encode_typed<T>(args, begin, end); });
}

void decode_sides(const RecordCodecArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { decode_typed<T>(args, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(encode_sides);
KVSWAP_EXPORT(decode_sides);

namespace {

constexpr int64_t kSidesPerPiece = 16;

}  // namespace

void encode_records(const RecordCodecArgs& args, const Execution& execution) {
  run_parallel(
      execution, args.count * args.shape.kv_heads * 2, kSidesPerPiece,
      [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(encode_sides)(args, begin, end); });
}

void decode_records(const RecordCodecArgs& args, const Execution& execution) {
  run_parallel(
      execution, args.count * args.shape.kv_heads * 2, kSidesPerPiece,
      [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(decode_sides)(args, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
