#include "kernels/int4_records.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/int4_records.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int kMiddle = 8;  // levels below 0
inline constexpr float kOuterLevel = 7.5f;
// A scale's byte is a float's exponent and three bits of its mantissa, from 2^-20 on.
inline constexpr int kScaleShift = 20;
inline constexpr int kScaleBase = ((127 - 20) << 3) - 1;
inline constexpr int kScaleMost = 254;
inline constexpr uint8_t kScaleNan = 255;

inline uint8_t scale_code(float largest) {
  if (largest == 0.0f) return 0;
  const auto bits = std::bit_cast<uint32_t>(largest / kOuterLevel);
  const int code = static_cast<int>((bits + (1u << kScaleShift) - 1) >> kScaleShift) - kScaleBase;
  return static_cast<uint8_t>(std::clamp(code, 1, kScaleMost));
}

inline float scale_of(uint8_t code) {
  if (code == 0) return 0.0f;
  if (code == kScaleNan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(static_cast<uint32_t>(code + kScaleBase) << kScaleShift);
}

/// Rows of one side of a KV head.
struct Int4Rows {
  int64_t tokens;
  int64_t width;
  bool has_mean;  // which stands before them
};

inline void scale_row(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

// Vectors of every processor, by the compiler's own operators.
constexpr int kSome = 8;
using Some [[gnu::vector_size(kSome * sizeof(float))]] = float;
using Places [[gnu::vector_size(kSome * sizeof(int32_t))]] = int32_t;

/// Sums and differences of neighbours that stand kHalf apart in each of kCount vectors.
template <int kCount, int kHalf>
inline void butterfly_within(Some* vectors) {
  constexpr Places kOthers = {0 ^ kHalf, 1 ^ kHalf, 2 ^ kHalf, 3 ^ kHalf,
                              4 ^ kHalf, 5 ^ kHalf, 6 ^ kHalf, 7 ^ kHalf};
  constexpr Places kSecond = {0 & kHalf, 1 & kHalf, 2 & kHalf, 3 & kHalf,
                              4 & kHalf, 5 & kHalf, 6 & kHalf, 7 & kHalf};
  for (int i = 0; i < kCount; ++i) {
    const Some others = __builtin_shuffle(vectors[i], kOthers);
    vectors[i] = others + (kSecond != 0 ? -vectors[i] : vectors[i]);
  }
}

/// The same of vectors.
template <int kCount, int kHalf>
inline void butterfly_across(Some* vectors) {
  if constexpr (kHalf < kCount) {
    for (int begin = 0; begin < kCount; begin += 2 * kHalf) {
      for (int i = begin; i < begin + kHalf; ++i) {
        const Some sum = vectors[i] + vectors[i + kHalf];
        vectors[i + kHalf] = vectors[i] - vectors[i + kHalf];
        vectors[i] = sum;
      }
    }
  }
}

/// Times an orthonormal Hadamard matrix: its own inverse.
template <int kBlock>
inline void rotate_block(float* row) {
  constexpr int kCount = kBlock / kSome;
  constexpr float kFactor = kBlock == 64 ? 0.125f : kBlock == 32 ? 0.17677669529663687f : 0.25f;
  Some vectors[kCount];
  std::memcpy(vectors, row, sizeof(vectors));
  butterfly_within<kCount, 1>(vectors);
  butterfly_within<kCount, 2>(vectors);
  butterfly_within<kCount, 4>(vectors);
  butterfly_across<kCount, 1>(vectors);
  butterfly_across<kCount, 2>(vectors);
  butterfly_across<kCount, 4>(vectors);
  for (Some& some : vectors) some *= kFactor;
  std::memcpy(row, vectors, sizeof(vectors));
}

template <int kBlock>
inline float largest_of(const float* block) {
  Floats found = zeros(), not_finite = zeros();
  for (int i = 0; i < kBlock; i += kLanes) {
    const Floats value = load(block + i);
    found = maximum(found, magnitude(value));
    not_finite = add(not_finite, multiply(value, zeros()));
  }
  return sum(not_finite) == 0.0f ? largest(found) : std::numeric_limits<float>::quiet_NaN();
}

/// To its scale and [kBlock / 2] levels; what they stand for goes to `rounded` where it is wanted.
template <int kBlock>
inline void encode_block(const float* block, uint8_t* scale, uint8_t* levels, float* rounded) {
  const float largest = largest_of<kBlock>(block);
  *scale = largest == largest ? scale_code(largest) : kScaleNan;
  const float step = scale_of(*scale);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  int32_t level[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const float place = std::min(std::max(0.0f, block[i] * inverse + kMiddle), 15.0f);
    level[i] = static_cast<int32_t>(place);
  }
  for (int i = 0; i < kBlock / 2; ++i) {
    levels[i] = static_cast<uint8_t>(level[i] | level[i + kBlock / 2] << 4);
  }
  if (rounded == nullptr) return;
  for (int i = 0; i < kBlock; ++i) {
    rounded[i] = (static_cast<float>(level[i]) - kOuterLevel) * step;
  }
}

template <int kBlock>
inline void decode_block(uint8_t scale, const uint8_t* levels, float* block) {
  const float step = scale_of(scale);
  for (int i = 0; i < kBlock / 2; ++i) {
    const int pair = levels[i];
    block[i] = (static_cast<float>(pair & 15) - kOuterLevel) * step;
    block[i + kBlock / 2] = (static_cast<float>(pair >> 4) - kOuterLevel) * step;
  }
}

template <int kBlock>
inline void encode_row(const float* row, int64_t width, uint8_t* coded, float* rounded) {
  const int64_t blocks = width / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    encode_block<kBlock>(row + b * kBlock, coded + b, coded + blocks + b * (kBlock / 2),
                         rounded == nullptr ? nullptr : rounded + b * kBlock);
  }
}

template <int kBlock>
inline void decode_row(const uint8_t* coded, int64_t width, float* row) {
  const int64_t blocks = width / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    decode_block<kBlock>(coded[b], coded + blocks + b * (kBlock / 2), row + b * kBlock);
  }
}

/// [rows, width] in fp32, each row rotated.
template <int kBlock, typename T>
inline void load_rotated(const T* side, int64_t count, float* rows) {
  for (int64_t i = 0; i < count; i += kLanes) store(load(side + i), rows + i);
  for (int64_t i = 0; i < count; i += kBlock) rotate_block<kBlock>(rows + i);
}

template <int kBlock, typename T>
inline void store_rotated(float* rows, int64_t count, T* side) {
  for (int64_t i = 0; i < count; i += kBlock) rotate_block<kBlock>(rows + i);
  for (int64_t i = 0; i < count; i += kLanes) store(load(rows + i), side + i);
}

/// Of the rows that are finite; 0 of none.
inline void mean_of(const float* rows, int64_t count, int64_t head_dim, float* mean) {
  std::fill_n(mean, head_dim, 0.0f);
  int64_t counted = 0;
  for (int64_t t = 0; t < count; ++t) {
    const float* row = rows + t * head_dim;
    float zero = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) zero += row[d] * 0.0f;
    if (zero != 0.0f) continue;
    for (int64_t d = 0; d < head_dim; ++d) mean[d] += row[d];
    ++counted;
  }
  if (counted > 0) scale_row(mean, head_dim, 1.0f / static_cast<float>(counted));
}

/// The rows of one side of a KV head: K's behind their mean, as differences to it.
template <int kBlock, typename T>
void encode_side(const Int4Rows& of, const T* side, uint8_t* target) {
  const auto [tokens, width, has_mean] = of;
  const int64_t count = tokens * width, row_bytes = Int4Shape::row_bytes(width);
  thread_local std::vector<float> scratch;
  scratch.resize(count + 2 * width);
  float* rows = scratch.data();
  float* mean = rows + count;
  float* rounded = mean + width;
  load_rotated<kBlock>(side, count, rows);
  if (has_mean) {
    mean_of(rows, tokens, width, mean);
    encode_row<kBlock>(mean, width, target, rounded);
    target += row_bytes;
  }
  for (int64_t t = 0; t < tokens; ++t, target += row_bytes) {
    float* row = rows + t * width;
    for (int64_t d = 0; has_mean && d < width; ++d) row[d] -= rounded[d];
    encode_row<kBlock>(row, width, target, nullptr);
  }
}

template <int kBlock, typename T>
void decode_side(const Int4Rows& of, const uint8_t* source, T* side) {
  const auto [tokens, width, has_mean] = of;
  const int64_t count = tokens * width, row_bytes = Int4Shape::row_bytes(width);
  thread_local std::vector<float> scratch;
  scratch.resize(count + width);
  float* rows = scratch.data();
  float* mean = rows + count;
  if (has_mean) {
    decode_row<kBlock>(source, width, mean);
    source += row_bytes;
  }
  for (int64_t t = 0; t < tokens; ++t, source += row_bytes) {
    float* row = rows + t * width;
    decode_row<kBlock>(source, width, row);
    for (int64_t d = 0; has_mean && d < width; ++d) row[d] += mean[d];
  }
  store_rotated<kBlock>(rows, count, side);
}

/// Calls body.operator()<block>().
template <typename Body>
void with_block(int64_t width, const Body& body) {
  switch (Int4Shape::block_of(width)) {
    case 64:
      return body.template operator()<64>();
    case 32:
      return body.template operator()<32>();
    default:
      return body.template operator()<16>();
  }
}

/// Calls body(rows, first element of the side, first byte of its code) for each side.
template <typename Body>
void each_side(const Int4Shape& shape, const Body& body) {
  const RecordShape& record = shape.record;
  const Int4Rows keys = {record.group_tokens, record.head_dim, true};
  const Int4Rows values = {record.group_tokens, record.value_width(), false};
  const int64_t key_bytes = (record.group_tokens + 1) * Int4Shape::row_bytes(keys.width);
  for (int64_t head = 0; head < record.kv_heads; ++head) {
    const int64_t element = head * record.head_elements();
    const int64_t byte = head * shape.head_bytes();
    body(keys, element, byte);
    body(values, element + record.value_elements(), byte + key_bytes);
  }
}

void encode_int4(const Int4Shape& shape, const std::byte* record, std::byte* coded) {
  with_float_type(shape.dtype, [&]<typename T>() {
    each_side(shape, [&](const Int4Rows& rows, int64_t element, int64_t byte) {
      with_block(rows.width, [&]<int kBlock>() {
        encode_side<kBlock>(rows, reinterpret_cast<const T*>(record) + element,
                            reinterpret_cast<uint8_t*>(coded) + byte);
      });
    });
  });
}

void decode_int4(const Int4Shape& shape, const std::byte* coded, std::byte* record) {
  with_float_type(shape.dtype, [&]<typename T>() {
    each_side(shape, [&](const Int4Rows& rows, int64_t element, int64_t byte) {
      with_block(rows.width, [&]<int kBlock>() {
        decode_side<kBlock>(rows, reinterpret_cast<const uint8_t*>(coded) + byte,
                            reinterpret_cast<T*>(record) + element);
      });
    });
  });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(encode_int4);
KVSWAP_EXPORT(decode_int4);

int64_t Int4Shape::block_of(int64_t width) {
  for (const int64_t size : {64, 32}) {
    if (width % size == 0) return size;
  }
  return kInt4HeadUnit;
}

void encode_int4_record(const Int4Shape& shape, const std::byte* record, std::byte* coded) {
  KVSWAP_DISPATCH(encode_int4)(shape, record, coded);
}

void decode_int4_record(const Int4Shape& shape, const std::byte* coded, std::byte* record) {
  KVSWAP_DISPATCH(decode_int4)(shape, coded, record);
}

}  // namespace kvswap
#endif  // HWY_ONCE
