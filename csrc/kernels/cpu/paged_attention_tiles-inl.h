// The inner loops of paged attention: scores, weights and weighted values of one block of tokens.
// Included once for each instruction set (see targets.h), hence the guard that toggles.
#if defined(KVSWAP_PAGED_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSWAP_PAGED_ATTENTION_TILES_INL_H_
#undef KVSWAP_PAGED_ATTENTION_TILES_INL_H_
#else
#define KVSWAP_PAGED_ATTENTION_TILES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/token_walk.h"
#include "kernels/float8_exponent.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();
inline constexpr int kTileRows = kRegisters == 32 ? 4 : 2;
inline constexpr int64_t kTileTokens = 4;

/// fp32 state of the rows of one KV head; query and output are padded to whole vectors of K.
struct AttentionState {
  int64_t rows = 0;
  int64_t stride = 0;
  float* query = nullptr;    // [rows, stride]
  float* output = nullptr;   // [rows, stride], not yet divided by the sum
  float* scores = nullptr;   // [rows, kBlockTokens], then their weights
  float* largest = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* decay = nullptr;    // [rows]: what the block does to what was summed before it
};

/// K and V of one head for a block of tokens, and those that come next.
struct HeadBlock {
  const char* const* slots = nullptr;        // [tokens, and on to a multiple of kTileTokens]
  const char* const* next_slots = nullptr;   // [next_tokens]
  const char* const* value_slots = nullptr;  // [tokens], of V
  const char* const* next_value_slots = nullptr;
  int64_t tokens = 0;
  int64_t next_tokens = 0;
  int64_t key_offset = 0;  // bytes from a slot to K of this head
  int64_t next_key_offset = 0;
  int64_t side_bytes = 0;  // from K to V
  int64_t head_dim = 0;
  int64_t value_dim = 0;
};

/// Slots up to whole tiles of tokens: the last one again.
inline void pad_slots(TokenBlock& block) {
  const int64_t whole = (block.count + kTileTokens - 1) / kTileTokens * kTileTokens;
  std::fill(block.slots + block.count, block.slots + whole, block.slots[block.count - 1]);
}

/// Asks for a piece of a row that comes next. Pages are scattered, so the hardware does not guess
/// where; a few lines at a time, all along, since only so many can be on their way at once.
/// Always inlined: g++ takes a function that only prefetches for one without effect, and drops it.
[[gnu::always_inline]] inline void prefetch_next(const HeadBlock& block,
                                                 const char* const* next_slots, int64_t token,
                                                 int64_t offset, int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  if (token >= block.next_tokens) return;
  const char* piece = next_slots[token] + block.next_key_offset + offset;
  for (int64_t byte = 0; byte < bytes; byte += kLineBytes) __builtin_prefetch(piece + byte);
}

/// How much of a vector of a row is there: a tail is rare, and would cost the loops their
/// registers if it were looked for in them.
enum class Extent { kWhole, kTail };

template <Extent kExtent, typename T>
inline Floats load_part(const T* source, int64_t count) {
  if constexpr (kExtent == Extent::kWhole) return load(source);
  return load_some(source, count);
}

/// sums[r, t] += query[r, d..] . key[t, d..] over one vector; `left` is what head_dim has from d
/// on.
template <Extent kExtent, typename T, int kRows>
inline void score_step(const float* query, int64_t stride, const T* const* keys, int64_t d,
                       int64_t left, Floats (&sums)[kRows][kTileTokens]) {
  Floats key[kTileTokens];
  KVSWAP_UNROLL
  for (int t = 0; t < kTileTokens; ++t) key[t] = load_part<kExtent>(keys[t] + d, left);
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Floats part = load(query + r * stride + d);
    KVSWAP_UNROLL
    for (int t = 0; t < kTileTokens; ++t) sums[r][t] = multiply_add(part, key[t], sums[r][t]);
  }
}

/// scores[r, t] = query[r] . key[t] for kRows rows and kTileTokens tokens.
template <typename T, int kRows>
inline void score_tile(const AttentionState& state, int64_t first_row, const HeadBlock& block,
                       int64_t token) {
  const float* query = state.query + first_row * state.stride;
  const T* keys[kTileTokens];
  for (int64_t t = 0; t < kTileTokens; ++t) {
    keys[t] = reinterpret_cast<const T*>(block.slots[token + t] + block.key_offset);
  }
  Floats sums[kRows][kTileTokens];
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSWAP_UNROLL
    for (int t = 0; t < kTileTokens; ++t) sums[r][t] = zeros();
  }
  int64_t d = 0;
  for (; d + kLanes <= block.head_dim; d += kLanes) {
    score_step<Extent::kWhole>(query, state.stride, keys, d, kLanes, sums);
  }
  if (d < block.head_dim) {
    score_step<Extent::kTail>(query, state.stride, keys, d, block.head_dim - d, sums);
  }
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sum4(sums[r], state.scores + (first_row + r) * kBlockTokens + token);
  }
}

template <typename T, int kRows>
void score_rows(const AttentionState& state, int64_t first_row, const HeadBlock& block) {
  const int64_t row_bytes = block.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t token = 0; token < block.tokens; token += kTileTokens) {
    for (int64_t t = 0; first_row == 0 && t < kTileTokens; ++t) {
      prefetch_next(block, block.next_slots, token + t, 0, row_bytes);
    }
    score_tile<T, kRows>(state, first_row, block, token);
  }
}

/// output[r, d..] = decay[r] * output[r, d..] + sum over tokens of weight[r, t] * value[t, d..]
template <Extent kExtent, typename T, int kRows, int kVectors>
void weigh_tile(const AttentionState& state, int64_t first_row, const HeadBlock& block, int64_t d) {
  float* output = state.output + first_row * state.stride + d;
  const float* weights = state.scores + first_row * kBlockTokens;
  const int64_t value_offset = block.key_offset + block.side_bytes;
  const int64_t piece_offset = block.side_bytes + d * static_cast<int64_t>(sizeof(T));
  constexpr int64_t piece_bytes = kVectors * kLanes * static_cast<int64_t>(sizeof(T));
  Floats sums[kRows][kVectors];
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] =
          multiply(load(output + r * state.stride + v * kLanes), fill(state.decay[first_row + r]));
    }
  }
  for (int64_t token = 0; token < block.tokens; ++token) {
    if (first_row == 0) {
      prefetch_next(block, block.next_value_slots, token, piece_offset, piece_bytes);
    }
    const T* row = reinterpret_cast<const T*>(block.value_slots[token] + value_offset);
    Floats value[kVectors];
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_part<kExtent>(row + d + v * kLanes, block.value_dim - d);
    }
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = fill(weights[r * kBlockTokens + token]);
      KVSWAP_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  KVSWAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) store(sums[r][v], output + r * state.stride + v * kLanes);
  }
}

template <typename T, int kRows>
void weigh_rows(const AttentionState& state, int64_t first_row, const HeadBlock& block) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= block.value_dim; d += 4 * kLanes) {
    weigh_tile<Extent::kWhole, T, kRows, 4>(state, first_row, block, d);
  }
  for (; d + kLanes <= block.value_dim; d += kLanes) {
    weigh_tile<Extent::kWhole, T, kRows, 1>(state, first_row, block, d);
  }
  if (d < block.value_dim) weigh_tile<Extent::kTail, T, kRows, 1>(state, first_row, block, d);
}

/// score = softcap * tanh(scale * score / softcap); beyond 10, tanh is 1 in fp32.
inline void cap_scores(const AttentionState& state, int64_t row, float scale, float softcap,
                       int64_t tokens) {
  float* scores = state.scores + row * kBlockTokens;
  const Floats one = fill(1.0f);
  for (int64_t t = 0; t < round_up_to_lanes(tokens); t += kLanes) {
    const Floats share = multiply(load(scores + t), fill(scale / softcap));
    const Floats below = multiply(maximum(multiply(share, fill(-1.0f)), fill(-10.0f)), fill(-1.0f));
    const Floats grown = exponential(multiply(maximum(below, fill(-10.0f)), fill(2.0f)));
    const Floats tanh = add(one, divide(fill(-2.0f), add(grown, one)));
    store(keep_nan(share, multiply(tanh, fill(softcap))), scores + t);
  }
}

/// scores[row, t] times 2^e of a side of token t's page: exact wherever it is multiplied in.
inline void multiply_by_powers(const AttentionState& state, const TokenBlock& block, int64_t side) {
  float powers[kBlockTokens];
  for (int64_t t = 0; t < block.count; ++t) {
    powers[t] = power_of_exponent(block.exponents[t][side]);
  }
  for (int64_t row = 0; row < state.rows; ++row) {
    float* scores = state.scores + row * kBlockTokens;
    for (int64_t t = 0; t < block.count; ++t) scores[t] *= powers[t];
  }
}

/// Turns a row's scores into weights relative to the largest so far.
inline void weigh_scores(const AttentionState& state, int64_t row, float scale, int64_t tokens) {
  float* scores = state.scores + row * kBlockTokens;
  const int64_t padded = round_up_to_lanes(tokens);
  std::fill(scores + tokens, scores + padded, kNothing);
  Floats largest_lanes = fill(kNothing);
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Floats scaled = multiply(load(scores + t), fill(scale));
    store(scaled, scores + t);
    largest_lanes = maximum(largest_lanes, scaled);
  }
  const float before = state.largest[row];
  const float now = std::max(before, largest(largest_lanes));
  const float reference = now == kNothing ? 0.0f : now;
  Floats sums = zeros();
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Floats below = add(load(scores + t), fill(-reference));
    const Floats weight = keep_nan(below, exponential(below));
    store(weight, scores + t);
    sums = add(sums, weight);
  }
  state.decay[row] = before == now ? 1.0f : std::exp(before - reference);
  state.sum[row] = state.sum[row] * state.decay[row] + sum(sums);
  state.largest[row] = now;
}

template <typename T>
void score_block(const AttentionState& state, const HeadBlock& block) {
  int64_t row = 0;
  for (; row + kTileRows <= state.rows; row += kTileRows) {
    score_rows<T, kTileRows>(state, row, block);
  }
  for (; row < state.rows; ++row) score_rows<T, 1>(state, row, block);
}

template <typename T>
void weigh_block(const AttentionState& state, const HeadBlock& block) {
  int64_t row = 0;
  for (; row + kTileRows <= state.rows; row += kTileRows) {
    weigh_rows<T, kTileRows>(state, row, block);
  }
  for (; row < state.rows; ++row) weigh_rows<T, 1>(state, row, block);
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSWAP_PAGED_ATTENTION_TILES_INL_H_
