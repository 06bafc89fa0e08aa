#include "kernels/observe_keys.h"

#include <algorithm>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/observe_keys.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/mass_rows-inl.h"
#include "kernels/cpu/mass_units.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// Query heads [first_head, first_head + heads) of one sequence over the keys of their KV head.
template <typename T>
class ChunkRun {
 public:
  ChunkRun(const ObserveKeysArgs& args, int64_t sequence, int64_t first_head, int64_t heads)
      : args_(args),
        sequence_(sequence),
        first_head_(first_head),
        kv_head_(first_head / (args.heads / args.kv_heads)),
        rows_(1, heads * args.queries, args.head_dim, args.scale, args.softcap) {
    for (int64_t row = 0; row < rows_.rows(); ++row) {
      const int64_t query = row % args.queries;
      const T* source = static_cast<const T*>(args.query) + sequence * args.query_batch_stride +
                        head_of(row) * args.query_head_stride + query * args.query_token_stride;
      const float of_row = args.log_sum_exp == nullptr ? kNothing : args.log_sum_exp[place_of(row)];
      rows_.set(0, row, source, args.tokens - args.queries + query, of_row);
    }
  }

  /// Into [batch, heads, queries].
  void sum(float* log_sum_exp) {
    for (int64_t first = 0; first < args_.tokens; first += kBlockTokens) {
      if (fill_block(first, args_.tokens)) rows_.template add_to_sums<T>(0, keys());
    }
    for (int64_t row = 0; row < rows_.rows(); ++row) {
      log_sum_exp[place_of(row)] = rows_.log_sum_exp(0, row);
    }
  }

  void weigh(int64_t first_token, int64_t last_token) {
    const int64_t at = (sequence_ * args_.kv_heads + kv_head_) * args_.tokens;
    std::fill(args_.mean + at + first_token, args_.mean + at + last_token, 0.0f);
    if (args_.square) std::fill(args_.square + at + first_token, args_.square + at + last_token, 0);
    for (int64_t first = first_token; first < last_token; first += kBlockTokens) {
      if (!fill_block(first, last_token)) continue;
      rows_.template weigh<T>(0, keys(), 0);
      for (int64_t t = 0; t < block_.count; ++t) {
        args_.mean[at + block_.positions[t]] = rows_.mean(t);
        if (args_.square) args_.square[at + block_.positions[t]] = rows_.square(t);
      }
    }
  }

 private:
  int64_t head_of(int64_t row) const { return first_head_ + row / args_.queries; }
  int64_t place_of(int64_t row) const {
    return (sequence_ * args_.heads + head_of(row)) * args_.queries + row % args_.queries;
  }

  /// The valid ones of up to kBlockTokens tokens; false: none is.
  bool fill_block(int64_t first, int64_t end) {
    const int64_t words = (args_.tokens + 63) / 64;
    const T* keys = static_cast<const T*>(args_.keys) + sequence_ * args_.key_batch_stride +
                    kv_head_ * args_.key_head_stride;
    block_.count = 0;
    for (int64_t token = first; token < std::min(first + kBlockTokens, end); ++token) {
      const bool is_valid =
          args_.valid == nullptr || (args_.valid[sequence_ * words + token / 64] >> token % 64 & 1);
      if (!is_valid) continue;
      block_.slots[block_.count] =
          reinterpret_cast<const char*>(keys + token * args_.key_token_stride);
      block_.positions[block_.count++] = static_cast<int32_t>(token);
    }
    if (block_.count > 0) rows_.look_at(block_);
    return block_.count > 0;
  }

  HeadBlock keys() const {
    return {.slots = block_.slots, .tokens = block_.count, .head_dim = args_.head_dim};
  }

  const ObserveKeysArgs& args_;
  int64_t sequence_;
  int64_t first_head_;
  int64_t kv_head_;
  MassRows rows_;
  TokenBlock block_;
};

template <typename T>
void sum_typed(const ObserveKeysArgs& args, float* log_sum_exp, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    ChunkRun<T>(args, i / args.heads, i % args.heads, 1).sum(log_sum_exp);
  }
}

template <typename T>
void weigh_typed(const ObserveKeysArgs& args, int64_t begin, int64_t end) {
  const MassUnits cut(args);
  const int64_t ratio = args.heads / args.kv_heads;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head = i / cut.parts;
    const int64_t first = i % cut.parts * cut.pages_each;
    ChunkRun<T>(args, head / args.kv_heads, head % args.kv_heads * ratio, ratio)
        .weigh(first, std::min(first + cut.pages_each, args.tokens));
  }
}

/// Heads are (sequence * heads) + head.
void sum_heads(const ObserveKeysArgs& args, float* log_sum_exp, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { sum_typed<T>(args, log_sum_exp, begin, end); });
}

void weigh_keys(const ObserveKeysArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { weigh_typed<T>(args, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(sum_heads);
KVSWAP_EXPORT(weigh_keys);

void observe_keys(const ObserveKeysArgs& args, const Execution& execution) {
  ObserveKeysArgs known = args;
  std::vector<float> log_sum_exp;  // [batch, heads, queries]
  if (args.log_sum_exp == nullptr) {
    log_sum_exp.resize(args.batch * args.heads * args.queries);
    run_parallel(execution, args.batch * args.heads, 1, [&](int64_t begin, int64_t end) {
      KVSWAP_DISPATCH(sum_heads)(args, log_sum_exp.data(), begin, end);
    });
    known.log_sum_exp = log_sum_exp.data();
  }
  const MassUnits cut(args);
  run_parallel(execution, cut.count, 1,
               [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(weigh_keys)(known, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
