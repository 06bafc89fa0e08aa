#include "kernels/chunk_attention.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/bf16_pairs.h"
#include "kernels/cpu/chunk_attention_pairs.h"
#include "kernels/cpu/chunk_rows.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/chunk_attention.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

using chunk::kLog2e;
using chunk::kNothing;
using chunk::kTileRows;
using chunk::SummaryEncoder;

constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;  // with kTileRows, sums for most registers
constexpr int64_t kBlockNumbers = 16384;  // of K, and as many of V: both fit a small L2
constexpr int64_t kBlockTokensMax = 256;
constexpr int64_t kBlockTokensMin = 64;

/// sums[r][v] = sum over steps of left[r, s] * right[s, v].
template <int kVectors>
HWY_INLINE void multiply_tile(const float* left, int64_t left_stride, const float* right,
                              int64_t step_stride, int64_t vector_stride, int64_t steps,
                              Floats (&sums)[kTileRows][kVectors]) {
  KVSWAP_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zeros();
  }
  for (int64_t s = 0; s < steps; ++s) {
    Floats numbers[kVectors];
    KVSWAP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      numbers[v] = load(right + s * step_stride + v * vector_stride);
    }
    KVSWAP_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const Floats number = fill(left[r * left_stride + s]);
      KVSWAP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = multiply_add(number, numbers[v], sums[r][v]);
      }
    }
  }
}

/// 2^a for a <= 0; 0 below -126, and NaN stays.
inline Floats weight_of(Floats a) {
  return where_greater(fill(-126.0f), a, zeros(), keep_nan(a, power_of_two(a)));
}

/// Blocks of one KV head, in fp32. T: the elements of query and tokens.
template <typename T>
class Attender {
 public:
  explicit Attender(const ChunkAttentionArgs& args)
      : args_(args),
        dim_(args.shape.head_dim),
        value_dim_(args.shape.value_width()),
        stride_(round_up_to_lanes(value_dim_)),
        block_tokens_(std::clamp(kBlockNumbers / dim_ / kBlockTokensMin * kBlockTokensMin,
                                 kBlockTokensMin, kBlockTokensMax)),
        factor_(is_capped() ? kLog2e : args.scale * kLog2e) {
    thread_local std::vector<float> scratch;
    const int64_t keys = block_tokens_ * dim_;
    const int64_t values = block_tokens_ * stride_;
    const int64_t weights = kTileRows * block_tokens_;
    const auto numbers = static_cast<size_t>(keys + values + weights + kTileRows * dim_ + kAligned);
    if (scratch.size() < numbers) scratch.resize(numbers);
    const auto unaligned = reinterpret_cast<uintptr_t>(scratch.data()) / sizeof(float) % kAligned;
    keys_ = scratch.data() + (kAligned - unaligned) % kAligned;
    values_ = keys_ + keys;
    weights_ = values_ + values;
    query_ = weights_ + weights;
  }

  int64_t block_tokens() const { return block_tokens_; }

  /// Tokens from `first` on; what is padding, or fills the last vector, as zeros.
  void lay_out(int64_t kv_head, int64_t first, int64_t tokens) {
    has_padding_ = false;
    for (int64_t t = 0; t < round_up_to_lanes(tokens); ++t) {
      const bool is_there = t < tokens;
      const T* key = is_there ? chunk::token_of<T>(args_, kv_head, 0, first + t) : nullptr;
      counts_[t] = key != nullptr;
      has_padding_ |= is_there && key == nullptr;
      float* to = keys_ + t / kLanes * dim_ * kLanes + t % kLanes;
      for (int64_t d = 0; d < dim_; ++d) to[d * kLanes] = key == nullptr ? 0 : to_float(key[d]);
      if (is_there) {
        widen(chunk::token_of<T>(args_, kv_head, 1, first + t), values_ + t * stride_);
      }
    }
  }

  void attend(SummaryEncoder& rows) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      const T* query = r < rows.count ? static_cast<const T*>(rows.query[r]) : nullptr;
      for (int64_t d = 0; d < dim_; ++d) {
        query_[r * dim_ + d] = query == nullptr ? 0 : to_float(query[d]);
      }
    }
    const int64_t vectors = (rows.most + kLanes - 1) / kLanes;
    int64_t v = 0;
    for (; v + kTileVectors <= vectors; v += kTileVectors) score<kTileVectors>(v);
    for (; v < vectors; ++v) score<1>(v);
    for (int64_t r = 0; r < kTileRows; ++r) weigh(rows, r, vectors);
    const int64_t parts = stride_ / kLanes;
    for (v = 0; v + kTileVectors <= parts; v += kTileVectors) add_values<kTileVectors>(rows, v);
    for (; v < parts; ++v) add_values<1>(rows, v);
  }

 private:
  static constexpr int64_t kAligned = 16;  // numbers: a cache line

  bool is_capped() const { return args_.softcap > 0; }

  void widen(const T* from, float* to) const {
    for (int64_t d = 0; d < stride_; d += kLanes) {
      const int64_t left = std::min(kLanes, value_dim_ - d);
      const Floats numbers = from == nullptr  ? zeros()
                             : left == kLanes ? load(from + d)
                                              : load_some(from + d, left);
      store(numbers, to + d);
    }
  }

  template <int kVectors>
  void score(int64_t vector) {
    Floats sums[kTileRows][kVectors];
    multiply_tile<kVectors>(query_, dim_, keys_ + vector * dim_ * kLanes, kLanes, dim_ * kLanes,
                            dim_, sums);
    KVSWAP_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      KVSWAP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        store(sums[r][v], weights_ + r * block_tokens_ + (vector + v) * kLanes);
      }
    }
  }

  /// A row's scores become its weights.
  void weigh(SummaryEncoder& rows, int64_t r, int64_t vectors) {
    float* scores = weights_ + r * block_tokens_;
    if (is_capped()) {
      for (int64_t v = 0; v < vectors; ++v) {
        store(capped(load(scores + v * kLanes)), scores + v * kLanes);
      }
    }
    for (int64_t t = 0; has_padding_ && t < rows.seen[r]; ++t) {
      if (!counts_[t]) scores[t] = kNothing;
    }
    std::fill(scores + rows.seen[r], scores + vectors * kLanes, kNothing);
    Floats most = fill(kNothing);  // or NaN, which weights will be too
    Floats other = most;
    for (int64_t v = 0; v + 1 < vectors; v += 2) {
      most = maximum(load(scores + v * kLanes), most);
      other = maximum(load(scores + (v + 1) * kLanes), other);
    }
    if (vectors % 2 != 0) most = maximum(load(scores + (vectors - 1) * kLanes), most);
    chunk::refer(rows, r, largest(maximum(most, other)));
    const Floats factor = fill(factor_);
    const Floats below = fill(-rows.base[r]);
    Floats added = zeros();
    for (int64_t v = 0; v < vectors; ++v) {
      const Floats score = add(load(scores + v * kLanes), below);
      const Floats weight = weight_of(multiply(score, factor));
      added = add(added, weight);
      store(weight, scores + v * kLanes);
    }
    chunk::settle(rows, r, factor_, sum(added));
  }

  /// cap * tanh(scale * score / cap): tanh(a) = 1 - 2 / (e^(2a) + 1), in fp32 1 from 16 on.
  Floats capped(Floats score) const {
    const Floats near = multiply(score, fill(args_.scale / args_.softcap));
    const Floats bounded =
        maximum(fill(-16.0f), where_greater(near, fill(16.0f), fill(16.0f), near));
    const Floats grown = exponential(add(bounded, bounded));
    const Floats rest = divide(fill(-2.0f), add(grown, fill(1.0f)));
    return keep_nan(score, multiply(add(rest, fill(1.0f)), fill(args_.softcap)));
  }

  template <int kVectors>
  void add_values(const SummaryEncoder& rows, int64_t vector) {
    Floats sums[kTileRows][kVectors];
    multiply_tile<kVectors>(weights_, block_tokens_, values_ + vector * kLanes, stride_, kLanes,
                            rows.most, sums);
    KVSWAP_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      if (r >= rows.count) continue;
      const Floats old_share = fill(rows.old_share[r]);
      const Floats new_share = fill(rows.new_share[r]);
      KVSWAP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const int64_t d = (vector + v) * kLanes;
        const int64_t left = std::min(kLanes, value_dim_ - d);
        float* output = rows.output[r] + d;
        const Floats old = left == kLanes ? load(output) : load_some(output, left);
        const Floats now = multiply_add(old, old_share, multiply(sums[r][v], new_share));
        if (left == kLanes) {
          store(now, output);
        } else {
          store_some(now, output, left);
        }
      }
    }
  }

  const ChunkAttentionArgs& args_;
  const int64_t dim_;
  const int64_t value_dim_;
  const int64_t stride_;  // of a row of V: whole vectors
  const int64_t block_tokens_;
  const float factor_;  // from a score to its exponent of two
  bool has_padding_ = false;
  bool counts_[kBlockTokensMax + kLanes] = {};
  float* keys_ = nullptr;     // [vectors of tokens, head_dim, kLanes]
  float* values_ = nullptr;   // [tokens, stride_]
  float* weights_ = nullptr;  // [kTileRows, block_tokens_]: scores, then weights
  float* query_ = nullptr;    // [kTileRows, head_dim]
};

void attend_wide(const ChunkAttentionArgs& args, const Execution& execution) {
  with_float_type(args.dtype,
                  [&]<typename T>() { chunk::attend_all<Attender<T>>(args, execution); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace kvswap {

KVSWAP_EXPORT(attend_wide);

void chunk_attention(const ChunkAttentionArgs& args, const Execution& execution) {
  if (args.dtype == DType::kBFloat16 && has_bf16_pairs()) {
    return chunk_attention_by_pairs(args, execution);
  }
  KVSWAP_DISPATCH(attend_wide)(args, execution);
}

bool has_bf16_tiles() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1U << 22;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0;
#else
  return false;
#endif
}

}  // namespace kvswap

#endif  // HWY_ONCE
