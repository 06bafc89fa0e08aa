// The vectors of Highway. See simd-inl.h.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using IntTag = hn::RebindToSigned<FloatTag>;
using HalfWordTag = hn::Rebind<uint16_t, FloatTag>;
using ByteTag = hn::Rebind<uint8_t, FloatTag>;
using SignedByteTag = hn::Rebind<int8_t, FloatTag>;
using Float16Tag = hn::Rebind<hwy::float16_t, FloatTag>;

using Floats = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;
inline constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
inline constexpr int kRegisters = HWY_TARGET == HWY_AVX2 ? 16 : 32;

inline Floats zeros() { return hn::Zero(FloatTag()); }
inline Floats fill(float value) { return hn::Set(FloatTag(), value); }
inline Words fill_words(uint32_t value) { return hn::Set(WordTag(), value); }
inline Floats as_floats(Words words) { return hn::BitCast(FloatTag(), words); }
inline Words as_words(Floats floats) { return hn::BitCast(WordTag(), floats); }

inline Floats load(const float* source) { return hn::LoadU(FloatTag(), source); }

inline Floats load(const BFloat16* source) {
  const auto half_words = hn::LoadU(HalfWordTag(), &source->bits);
  return as_floats(hn::ShiftLeft<16>(hn::PromoteTo(WordTag(), half_words)));
}

inline Floats load(const Float16* source) {
  const auto half_words = hn::LoadU(HalfWordTag(), &source->bits);
  return hn::PromoteTo(FloatTag(), hn::BitCast(Float16Tag(), half_words));
}

template <typename T>
inline void load_two(const T* source, Floats& one, Floats& other) {
  one = load(source);
  other = load(source + kLanes);
}

/// Those at even places and those at odd ones: a bf16 is the upper half of a float.
inline void load_two(const BFloat16* source, Floats& one, Floats& other) {
  const auto pairs =
      hn::BitCast(WordTag(), hn::LoadU(hn::Repartition<uint16_t, WordTag>(), &source->bits));
  one = as_floats(hn::ShiftLeft<16>(pairs));
  other = as_floats(hn::And(pairs, fill_words(0xffff0000)));
}

inline Floats load(const int8_t* source) {
  return hn::ConvertTo(FloatTag(), hn::PromoteTo(IntTag(), hn::LoadU(SignedByteTag(), source)));
}

inline void load_pair(const Int4Pair* source, Floats& low, Floats& high) {
  const auto both = hn::PromoteTo(IntTag(), hn::LoadU(SignedByteTag(), &source->bits));
  low = hn::ConvertTo(FloatTag(), hn::ShiftRight<28>(hn::ShiftLeft<28>(both)));
  high = hn::ConvertTo(FloatTag(), hn::ShiftRight<4>(both));
}

/// The exponent of e4m3 is put into that of a half, which is 2^8 too small, then widened.
inline Floats load(const Float8* source) {
  const auto half_words = hn::PromoteTo(HalfWordTag(), hn::LoadU(ByteTag(), &source->bits));
  const auto magnitudes = hn::And(half_words, hn::Set(HalfWordTag(), 0x7f));
  const auto signs = hn::ShiftLeft<8>(hn::Xor(half_words, magnitudes));
  const auto halves = hn::Or(signs, hn::ShiftLeft<7>(magnitudes));
  const auto values =
      hn::Mul(hn::PromoteTo(FloatTag(), hn::BitCast(Float16Tag(), halves)), fill(256.0f));
  const auto not_a_number = hn::Gt(hn::Abs(values), fill(448.0f));
  return hn::IfThenElse(not_a_number, hn::NaN(FloatTag()), values);
}

/// The low 16 (or 8) bits of words that hold no more than that.
inline void store_low(Words words, uint16_t* target) {
  hn::StoreU(hn::DemoteTo(HalfWordTag(), hn::BitCast(IntTag(), words)), HalfWordTag(), target);
}
inline void store_low(Words words, uint8_t* target) {
  hn::StoreU(hn::DemoteTo(ByteTag(), hn::BitCast(IntTag(), words)), ByteTag(), target);
}

inline void store(Floats value, float* target) { hn::StoreU(value, FloatTag(), target); }

inline void store(Floats value, BFloat16* target) {
  const auto words = as_words(value);
  const auto odd = hn::And(hn::ShiftRight<16>(words), fill_words(1));
  const auto rounded = hn::Add(hn::Add(words, fill_words(0x7fff)), odd);
  const auto numbers =
      hn::IfThenElse(hn::Eq(value, value), as_floats(rounded), as_floats(fill_words(0x7fc00000)));
  store_low(hn::ShiftRight<16>(as_words(numbers)), &target->bits);
}

inline void store(Floats value, Float16* target) {
  const auto halves = hn::DemoteTo(Float16Tag(), value);
  hn::StoreU(hn::BitCast(HalfWordTag(), halves), HalfWordTag(), &target->bits);
}

inline void store(Floats value, int8_t* target) {
  hn::StoreU(hn::DemoteTo(SignedByteTag(), hn::NearestInt(value)), SignedByteTag(), target);
}

/// Rounds as from_float<Float8> does, lane by lane.
inline void store(Floats value, Float8* target) {
  const auto magnitude = hn::And(as_words(value), fill_words(0x7fffffff));
  const auto sign = hn::ShiftRight<24>(hn::Xor(as_words(value), magnitude));
  const auto shifted = hn::Add(as_floats(magnitude), fill(0x1p14f));
  const auto subnormal = hn::Sub(as_words(shifted), fill_words(0x46800000));
  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), fill_words(1));
  const auto rounded = hn::Add(hn::Add(magnitude, fill_words(0x7ffff)), odd);
  const auto normal = hn::ShiftRight<20>(hn::Sub(rounded, fill_words(0x3c000000)));
  const auto in_range =
      hn::IfThenElse(hn::Lt(magnitude, fill_words(0x3c800000)), subnormal, normal);
  const auto bits =
      hn::IfThenElse(hn::Lt(magnitude, fill_words(0x43f00000)), in_range, fill_words(0x7f));
  store_low(hn::Or(sign, bits), &target->bits);
}

inline Floats add(Floats a, Floats b) { return hn::Add(a, b); }
inline Floats multiply(Floats a, Floats b) { return hn::Mul(a, b); }
inline Floats divide(Floats a, Floats b) { return hn::Div(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return hn::MulAdd(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return hn::Max(a, b); }
inline Floats magnitude(Floats a) { return hn::Abs(a); }
inline Floats exponential(Floats a) { return hn::Exp(FloatTag(), a); }

/// 2^a for -126 <= a < 128, within 3e-7 of it: 2^fraction by a polynomial, the whole part as the
/// exponent.
inline Floats power_of_two(Floats a) {
  const auto whole = hn::Round(a);
  const auto fraction = hn::Sub(a, whole);
  auto value = hn::MulAdd(fraction, fill(0.0013276471f), fill(0.0096755410f));
  value = hn::MulAdd(fraction, value, fill(0.055507131f));
  value = hn::MulAdd(fraction, value, fill(0.24022120f));
  value = hn::MulAdd(fraction, value, fill(0.69314694f));
  value = hn::MulAdd(fraction, value, fill(1.0000001f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(IntTag(), whole));
  return hn::BitCast(FloatTag(), hn::Add(hn::BitCast(IntTag(), value), exponent));
}

inline Floats nan_to(Floats a, float substitute) {
  return hn::IfThenElse(hn::Eq(a, a), a, fill(substitute));
}
/// `a`, but `from` where that is no number: a clamp must not hide it.
inline Floats keep_nan(Floats from, Floats a) {
  return hn::IfThenElse(hn::Eq(from, from), a, from);
}
inline Floats pairwise_max(Floats a, Floats b) {
  return hn::Max(hn::ConcatEven(FloatTag(), b, a), hn::ConcatOdd(FloatTag(), b, a));
}
inline Floats pairwise_add(Floats a, Floats b) {
  return hn::Add(hn::ConcatEven(FloatTag(), b, a), hn::ConcatOdd(FloatTag(), b, a));
}
inline Floats where_greater(Floats a, Floats b, Floats yes, Floats no) {
  return hn::IfThenElse(hn::Gt(a, b), yes, no);
}

/// Bit i is set where lane i of `a` is greater than lane i of `b`.
inline uint64_t greater_bits(Floats a, Floats b) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(FloatTag(), hn::Gt(a, b), bytes);
  uint64_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

inline float sum(Floats a) { return hn::GetLane(hn::SumOfLanes(FloatTag(), a)); }
inline float largest(Floats a) { return hn::GetLane(hn::MaxOfLanes(FloatTag(), a)); }

/// Halves a vector until one block of four lanes is left, adding the halves.
template <class Tag>
inline void store_block_sums(Tag tag, hn::Vec<Tag> value, float* target) {
  if constexpr (hn::MaxLanes(tag) == 4) {
    hn::StoreU(value, tag, target);
  } else {
    const hn::Half<Tag> half;
    store_block_sums(half, hn::Add(hn::LowerHalf(half, value), hn::UpperHalf(half, value)), target);
  }
}

/// target[i] = sum(values[i])
inline void sum4(const Floats* values, float* target) {
  const FloatTag tag;
  const auto interleave_add = [&](Floats a, Floats b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(tag, a, b), hn::InterleaveUpper(tag, a, b));
  };
  const auto even = interleave_add(values[0], values[2]);  // blocks of 0 2 0 2
  const auto odd = interleave_add(values[1], values[3]);   // blocks of 1 3 1 3
  store_block_sums(tag, interleave_add(even, odd), target);
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
