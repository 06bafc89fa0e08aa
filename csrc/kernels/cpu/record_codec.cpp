#include "kernels/record_codec.h"

#include <limits>

#include "kernels/float8_exponent.h"
#include "kernels/record_rows.h"

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

/// Elements of a record that share an exponent: a side of a KV head, K before V, or of so many
/// `parts` of it one.
struct Part {
  Part(const RecordShape& shape, int64_t parts, int64_t index) {
    const int64_t side = index / parts;
    const int64_t head = side / 2;
    record = head / shape.kv_heads;
    count = shape.side_elements(side % 2) / parts;
    offset = head % shape.kv_heads * shape.head_elements() + side % 2 * shape.value_elements() +
             index % parts * count;
  }

  int64_t record;
  int64_t offset;
  int64_t count;
};

template <typename T>
void encode_typed(const RecordCodecArgs& args, int64_t parts, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const Part part(args.shape, parts, i);
    encode_side(static_cast<const T*>(args.from[part.record]) + part.offset,
                static_cast<Float8*>(args.to[part.record]) + part.offset, args.exponents + i,
                args.dtype, part.count);
  }
}

template <typename T>
void decode_typed(const RecordCodecArgs& args, int64_t parts, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const Part part(args.shape, parts, i);
    decode_side(static_cast<const Float8*>(args.from[part.record]) + part.offset,
                static_cast<T*>(args.to[part.record]) + part.offset, args.exponents[i], part.count);
  }
}

void encode_parts(const RecordCodecArgs& args, int64_t parts, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { encode_typed<T>(args, parts, begin, end); });
}

void decode_parts(const RecordCodecArgs& args, int64_t parts, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { decode_typed<T>(args, parts, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(encode_parts);
KVSWAP_EXPORT(decode_parts);

namespace {

constexpr int64_t kPartsPerPiece = 16;

void encode(const RecordCodecArgs& args, int64_t parts, const Execution& execution) {
  run_parallel(
      execution, args.count * args.shape.kv_heads * 2 * parts, kPartsPerPiece,
      [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(encode_parts)(args, parts, begin, end); });
}

void decode(const RecordCodecArgs& args, int64_t parts, const Execution& execution) {
  run_parallel(
      execution, args.count * args.shape.kv_heads * 2 * parts, kPartsPerPiece,
      [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(decode_parts)(args, parts, begin, end); });
}

}  // namespace

void encode_records(const RecordCodecArgs& args, const Execution& execution) {
  encode(args, 1, execution);
}

void decode_records(const RecordCodecArgs& args, const Execution& execution) {
  decode(args, 1, execution);
}

void encode_record_rows(const RecordCodecArgs& args, const Execution& execution) {
  encode(args, args.shape.group_tokens, execution);
}

void decode_record_rows(const RecordCodecArgs& args, const Execution& execution) {
  decode(args, args.shape.group_tokens, execution);
}

}  // namespace kvswap
#endif  // HWY_ONCE
