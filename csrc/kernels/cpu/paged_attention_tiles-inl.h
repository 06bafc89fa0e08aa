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
#include <vector>

#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/token_walk.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int kTileRows = kRegisters == 32 ? 4 : 2;

/// fp32 state of one task; all rows are padded to whole vectors.
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

AttentionState make_attention_state(int64_t rows, int64_t head_dim) {
  thread_local std::vector<float> scratch;
  const int64_t stride = round_up_to_lanes(head_dim);
  const size_t size = rows * (2 * stride + kBlockTokens + 3);
  if (scratch.size() < size) scratch.resize(size);
  AttentionState state{.rows = rows, .stride = stride, .query = scratch.data()};
  state.output = state.query + rows * stride;
  state.scores = state.output + rows * stride;
  state.largest = state.scores + rows * kBlockTokens;
  state.sum = state.largest + rows;
  state.decay = state.sum + rows;
  std::fill_n(state.query, 2 * rows * stride, 0.0f);
  std::fill_n(state.largest, rows, kNothing);
  std::fill_n(state.sum, rows, 0.0f);
  return state;
}

template <typename T>
inline Floats load_row(const T* row, int64_t d, int64_t head_dim) {
  return d + kLanes <= head_dim ? load(row + d) : load_some(row + d, head_dim - d);
}

/// scores[r, t] = query[r] . keys[t] for kRows rows and four tokens.
template <typename T, int kRows>
void score_tile(const AttentionState& state, int64_t first_row, const char* const* keys, int64_t token,
                int64_t head_dim) {
  const float* query = state.query + first_row * state.stride;
  Floats sums[kRows][4];
  for (auto& row : sums) std::fill_n(row, 4, zeros());
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Floats key[4];
    for (int t = 0; t < 4; ++t) {
      key[t] = load_row(reinterpret_cast<const T*>(keys[token + t]), d, head_dim);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats part = load(query + r * state.stride + d);
      for (int t = 0; t < 4; ++t) sums[r][t] = multiply_add(part, key[t], sums[r][t]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    sum4(sums[r], state.scores + (first_row + r) * kBlockTokens + token);
  }
}

template <typename T, int kRows>
void score_rows(const AttentionState& state, int64_t first_row, const char* const* keys, int64_t tokens,
                int64_t head_dim) {
  for (int64_t token = 0; token < tokens; token += 4) {
    score_tile<T, kRows>(state, first_row, keys, token, head_dim);
  }
}

/// output[r, d..] = decay[r] * output[r, d..] + sum over tokens of weight[r, t] * value[t, d..]
template <typename T, int kRows, int kVectors>
void weigh_tile(const AttentionState& state, int64_t first_row, const char* const* keys, int64_t tokens,
                int64_t value_offset, int64_t d, int64_t head_dim) {
  float* output = state.output + first_row * state.stride + d;
  const float* weights = state.scores + first_row * kBlockTokens;
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = multiply(load(output + r * state.stride + v * kLanes),
                            fill(state.decay[first_row + r]));
    }
  }
  for (int64_t token = 0; token < tokens; ++token) {
    const T* row = reinterpret_cast<const T*>(keys[token] + value_offset);
    Floats value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = load_row(row, d + v * kLanes, head_dim);
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = fill(weights[r * kBlockTokens + token]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(sums[r][v], output + r * state.stride + v * kLanes);
  }
}

template <typename T, int kRows>
void weigh_rows(const AttentionState& state, int64_t first_row, const char* const* keys, int64_t tokens,
                int64_t value_offset, int64_t head_dim) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    weigh_tile<T, kRows, 4>(state, first_row, keys, tokens, value_offset, d, head_dim);
  }
  for (; d < head_dim; d += kLanes) {
    weigh_tile<T, kRows, 1>(state, first_row, keys, tokens, value_offset, d, head_dim);
  }
}

/// Turns a row's scores into weights relative to the largest so far. `tokens` are padded with
/// -inf to `padded`, a multiple of kLanes.
void weigh_scores(const AttentionState& state, int64_t row, float scale, int64_t padded) {
  float* scores = state.scores + row * kBlockTokens;
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
    const Floats weight = exponential(add(load(scores + t), fill(-reference)));
    store(weight, scores + t);
    sums = add(sums, weight);
  }
  state.decay[row] = std::exp(before - reference);
  state.sum[row] = state.sum[row] * state.decay[row] + sum(sums);
  state.largest[row] = now;
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSWAP_PAGED_ATTENTION_TILES_INL_H_
