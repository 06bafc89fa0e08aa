#include "kernels/project.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/int4_rows.h"
#include "kernels/low_rank_score.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/project.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr int64_t kPanelTokens = kSummaryBlock;  // rows whose sums stay in the first cache
inline constexpr int kTileTokens = kRegisters == 32 ? 8 : 4;
inline constexpr int kTileVectors = 3;

/// The matrix of one KV head, its rows padded to whole vectors.
struct Factor {
  const float* values = nullptr;  // [head_dim, stride]
  int64_t stride = 0;
  int64_t head_dim = 0;
};

/// sums[t, column..] += keys[t, :] * factor[:, column..] for kTokens rows and kVectors vectors.
template <int kTokens, int kVectors>
void multiply_tile(const float* keys, const Factor& factor, int64_t column, float* sums) {
  Floats tile[kTokens][kVectors];
  KVSWAP_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      tile[t][v] = load(sums + t * factor.stride + column + v * kLanes);
    }
  }
  for (int64_t d = 0; d < factor.head_dim; ++d) {
    Floats row[kVectors];
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      row[v] = load(factor.values + d * factor.stride + column + v * kLanes);
    }
    KVSWAP_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const Floats key = fill(keys[t * factor.head_dim + d]);
      KVSWAP_UNROLL
      for (int v = 0; v < kVectors; ++v) tile[t][v] = multiply_add(key, row[v], tile[t][v]);
    }
  }
  KVSWAP_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      store(tile[t][v], sums + t * factor.stride + column + v * kLanes);
    }
  }
}

template <int kTokens>
void multiply_rows(const float* keys, const Factor& factor, float* sums) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= factor.stride; column += kTileVectors * kLanes) {
    multiply_tile<kTokens, kTileVectors>(keys, factor, column, sums);
  }
  if (column + 2 * kLanes <= factor.stride) {
    multiply_tile<kTokens, 2>(keys, factor, column, sums);
  } else if (column < factor.stride) {
    multiply_tile<kTokens, 1>(keys, factor, column, sums);
  }
}

template <typename T>
void widen(const T* source, float* target, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(load(source + i), target + i);
  for (; i < size; ++i) target[i] = to_float(source[i]);
}

/// sums [tokens, stride] = the projected keys of up to kPanelTokens tokens.
template <typename T>
void project_panel(const ProjectKeysArgs& args, const float* factors, int64_t first_token,
                   int64_t tokens, float* keys, float* sums) {
  const int64_t stride = round_up_to_lanes(args.rank);
  std::fill_n(sums, tokens * stride, 0.0f);
  for (int64_t head = 0; head < args.kv_heads; ++head) {
    const T* source = static_cast<const T*>(args.keys) + head * args.head_stride +
                      first_token * args.token_stride;
    for (int64_t t = 0; t < tokens; ++t) {
      widen(source + t * args.token_stride, keys + t * args.head_dim, args.head_dim);
    }
    const Factor factor{.values = factors + head * args.head_dim * stride,
                        .stride = stride,
                        .head_dim = args.head_dim};
    int64_t t = 0;
    for (; t + kTileTokens <= tokens; t += kTileTokens) {
      multiply_rows<kTileTokens>(keys + t * args.head_dim, factor, sums + t * stride);
    }
    for (; t < tokens; ++t) multiply_rows<1>(keys + t * args.head_dim, factor, sums + t * stride);
  }
}

/// Sets a row's scale, by which its largest magnitude becomes `most`; returns 1 / scale, or 0.
float set_scale(const ProjectKeysArgs& args, const float* sums, int64_t row, float most) {
  float limit = 0.0f;
  bool is_finite = true;
  for (int64_t r = 0; r < args.rank; ++r) {
    limit = std::max(limit, std::fabs(sums[r]));
    is_finite &= std::isfinite(sums[r]);
  }
  const float scale = is_finite ? level_scale(limit, most) : NAN;
  args.token_scale[row] = scale;
  return scale > 0.0f ? 1.0f / scale : 0.0f;
}

int8_t level_of(float value, float inverse, float most) {
  const float level = inverse > 0.0f ? std::nearbyint(value * inverse) : 0.0f;
  return static_cast<int8_t>(std::clamp(level, -most, most));
}

/// Writes one token's row into its lane of the summary.
template <typename T>
void store_row(const ProjectKeysArgs& args, const float* sums, int64_t row) {
  const int64_t block = row / kSummaryBlock;
  const int64_t lane = row % kSummaryBlock;
  const int64_t first = args.rank - args.rest_rank;
  T* summary = static_cast<T*>(args.summary) + block * first * kSummaryBlock + lane;
  T* rest = static_cast<T*>(args.rest) + block * args.rest_rank * kSummaryBlock + lane;
  float inverse = 1.0f;
  if constexpr (std::is_same_v<T, int8_t>) inverse = set_scale(args, sums, row, 127.0f);
  for (int64_t r = 0; r < args.rank; ++r) {
    T& target = r < first ? summary[r * kSummaryBlock] : rest[(r - first) * kSummaryBlock];
    if constexpr (std::is_same_v<T, int8_t>) {
      target = level_of(sums[r], inverse, 127.0f);
    } else {
      target = from_float<T>(std::isfinite(sums[r]) ? sums[r] : NAN);
    }
  }
}

/// As store_row(), two columns to a byte; none stand apart.
void store_int4_row(const ProjectKeysArgs& args, const float* sums, int64_t row) {
  const int64_t bytes = row_bytes(DType::kInt4, args.rank);
  uint8_t* target = static_cast<uint8_t*>(args.summary) +
                    row / kSummaryBlock * bytes * kSummaryBlock + row % kSummaryBlock;
  const float inverse = set_scale(args, sums, row, kInt4Levels);
  for (int64_t r = 0; r < args.rank; r += 2) {
    const int low = level_of(sums[r], inverse, kInt4Levels);
    const int high = r + 1 < args.rank ? level_of(sums[r + 1], inverse, kInt4Levels) : 0;
    target[r / 2 * kSummaryBlock] = static_cast<uint8_t>((low & 0xf) | (high & 0xf) << 4);
  }
}

template <typename T>
void store_rows(const ProjectKeysArgs& args, const float* sums, int64_t first_token,
                int64_t tokens) {
  const int64_t stride = round_up_to_lanes(args.rank);
  for (int64_t t = 0; t < tokens; ++t) {
    store_row<T>(args, sums + t * stride, args.first_row + first_token + t);
  }
}

void store_panel(const ProjectKeysArgs& args, const float* sums, int64_t first_token,
                 int64_t tokens) {
  switch (args.summary_dtype) {
    case DType::kFloat32:
      return store_rows<float>(args, sums, first_token, tokens);
    case DType::kBFloat16:
      return store_rows<BFloat16>(args, sums, first_token, tokens);
    case DType::kFloat16:
      return store_rows<Float16>(args, sums, first_token, tokens);
    case DType::kInt8:
      return store_rows<int8_t>(args, sums, first_token, tokens);
    case DType::kInt4:
      for (int64_t t = 0; t < tokens; ++t) {
        store_int4_row(args, sums + t * round_up_to_lanes(args.rank),
                       args.first_row + first_token + t);
      }
      return;
  }
}

template <typename T>
void project_keys_typed(const ProjectKeysArgs& args) {
  const int64_t stride = round_up_to_lanes(args.rank);
  const int64_t dims = args.kv_heads * args.head_dim;
  thread_local std::vector<float> padded;   // [dims, stride]
  thread_local std::vector<float> scratch;  // keys [panel, head_dim], then sums [panel, stride]
  const float* factors = args.projection;
  if (stride != args.rank) {
    padded.assign(dims * stride, 0.0f);
    for (int64_t d = 0; d < dims; ++d) {
      std::copy_n(args.projection + d * args.rank, args.rank, padded.data() + d * stride);
    }
    factors = padded.data();
  }
  scratch.resize(kPanelTokens * (args.head_dim + stride));
  float* keys = scratch.data();
  float* sums = keys + kPanelTokens * args.head_dim;
  for (int64_t first = 0; first < args.tokens; first += kPanelTokens) {
    const int64_t tokens = std::min(kPanelTokens, args.tokens - first);
    project_panel<T>(args, factors, first, tokens, keys, sums);
    store_panel(args, sums, first, tokens);
  }
}

void project_keys(const ProjectKeysArgs& args) {
  with_float_type(args.key_dtype, [&]<typename T>() { project_keys_typed<T>(args); });
}

/// grouped[g * head_dim + d] = sum of the query heads of KV head g.
template <typename T>
void sum_query_heads(const ProjectQueryArgs& args, float* grouped) {
  const int64_t ratio = args.heads / args.kv_heads;
  for (int64_t head = 0; head < args.heads; ++head) {
    const T* source = static_cast<const T*>(args.query) + head * args.head_stride;
    float* target = grouped + head / ratio * args.head_dim;
    for (int64_t d = 0; d < args.head_dim; ++d) target[d] += to_float(source[d]);
  }
}

/// projected[column..] = sum over d of grouped[d] * projection[d, column..], one vector wide.
void project_columns(const ProjectQueryArgs& args, const float* grouped, int64_t column) {
  constexpr int kUnroll = 4;  // as many sums hide the latency of an addition
  const int64_t width = std::min<int64_t>(kLanes, args.rank - column);
  const int64_t dims = args.kv_heads * args.head_dim;
  const float* factors = args.projection + column;
  Floats sums[kUnroll] = {zeros(), zeros(), zeros(), zeros()};
  const auto accumulate = [&](int64_t d, Floats& into) HWY_ATTR {
    const float* source = factors + d * args.rank;
    const Floats row = width == kLanes ? load(source) : load_some(source, width);
    into = multiply_add(fill(grouped[d]), row, into);
  };
  int64_t d = 0;
  for (; d + kUnroll <= dims; d += kUnroll) {
    for (int u = 0; u < kUnroll; ++u) accumulate(d + u, sums[u]);
  }
  for (; d < dims; ++d) accumulate(d, sums[0]);
  const Floats total = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
  store_some(total, args.projected + column, width);
}

void project_query(const ProjectQueryArgs& args) {
  thread_local std::vector<float> grouped;  // [kv_heads * head_dim]
  grouped.assign(args.kv_heads * args.head_dim, 0.0f);
  switch (args.dtype) {
    case DType::kFloat32:
      sum_query_heads<float>(args, grouped.data());
      break;
    case DType::kBFloat16:
      sum_query_heads<BFloat16>(args, grouped.data());
      break;
    case DType::kFloat16:
      sum_query_heads<Float16>(args, grouped.data());
      break;
    case DType::kInt8:
    case DType::kInt4:
      return;
  }
  for (int64_t column = 0; column < args.rank; column += kLanes) {
    project_columns(args, grouped.data(), column);
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(project_keys);
KVSWAP_EXPORT(project_query);

void project_keys(const ProjectKeysArgs& args) { KVSWAP_DISPATCH(project_keys)(args); }

void project_query(const ProjectQueryArgs& args) { KVSWAP_DISPATCH(project_query)(args); }

}  // namespace kvswap
#endif  // HWY_ONCE
