#include "kernels/linear_rows.h"

#include <algorithm>

#include "kernels/cpu/bf16_pairs.h"
#include "kernels/cpu/linear_rows_pairs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear_rows.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/targets.h"

// Must come after targets.h.
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

constexpr int kTileOutputs = 4;
constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // with kTileOutputs, sums for half of them
constexpr int kOutputsOfOne = 8;  // of a single row: as many sums as multiply-adds under way

/// The sums of kOutputs outputs from `output` on, of kRows rows from `row` on: as many streams from
/// memory at a time as there are outputs.
template <typename T, int kOutputs, int kRows>
void multiply(const LinearRowsArgs& args, int64_t output, int64_t row) {
  const T* weight = static_cast<const T*>(args.weight) + output * args.inputs;
  const T* input = static_cast<const T*>(args.input) + row * args.inputs;
  Floats sums[kOutputs][kRows];
  KVSWAP_UNROLL
  for (int o = 0; o < kOutputs; ++o) {
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) sums[o][r] = zeros();
  }
  const T* ahead = row == 0 ? weight + kOutputs * args.inputs : weight;
  int64_t at = 0;
  for (; at + 2 * kLanes <= args.inputs; at += 2 * kLanes) {
    fetch_ahead<kOutputs * 2 * kLanes * sizeof(T)>(ahead + kOutputs * at);
    Floats some[kRows], others[kRows];
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) load_two(input + at + r * args.inputs, some[r], others[r]);
    KVSWAP_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      Floats one, other;
      load_two(weight + at + o * args.inputs, one, other);
      KVSWAP_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[o][r] = multiply_add(other, others[r], multiply_add(one, some[r], sums[o][r]));
      }
    }
  }
  for (; at < args.inputs; at += kLanes) {
    const int64_t count = std::min(kLanes, args.inputs - at);
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Floats part = load_some(input + at + r * args.inputs, count);
      KVSWAP_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        const Floats weights = load_some(weight + at + o * args.inputs, count);
        sums[o][r] = multiply_add(weights, part, sums[o][r]);
      }
    }
  }
  const T* bias = static_cast<const T*>(args.bias);
  for (int o = 0; o < kOutputs; ++o) {
    const float added = bias == nullptr ? 0.0f : to_float(bias[output + o]);
    for (int r = 0; r < kRows; ++r) {
      static_cast<T*>(args.output)[(row + r) * args.outputs + output + o] =
          from_float<T>(sum(sums[o][r]) + added);
    }
  }
}

/// The weights of a few outputs stay in the cache for all rows.
template <typename T, int kOutputs>
void multiply_rows(const LinearRowsArgs& args, int64_t output) {
  int64_t row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows) {
    multiply<T, kOutputs, kTileRows>(args, output, row);
  }
  for (; row < args.rows; ++row) multiply<T, kOutputs, 1>(args, output, row);
}

template <typename T>
void linear_outputs_of(const LinearRowsArgs& args, int64_t begin, int64_t end) {
  int64_t output = begin;
  if (args.rows == 1) {
    for (; output + kOutputsOfOne <= end; output += kOutputsOfOne) {
      multiply<T, kOutputsOfOne, 1>(args, output, 0);
    }
  }
  for (; output + kTileOutputs <= end; output += kTileOutputs) {
    multiply_rows<T, kTileOutputs>(args, output);
  }
  for (; output < end; ++output) multiply_rows<T, 1>(args, output);
}

void linear_outputs(const LinearRowsArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { linear_outputs_of<T>(args, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(linear_outputs);

void linear_rows(const LinearRowsArgs& args, const Execution& execution) {
  constexpr int64_t kOutputsAtLeast = 64;  // of a thread
  const bool is_by_pairs = args.dtype == DType::kBFloat16 && has_bf16_pairs();
  run_parallel(execution, args.outputs, kOutputsAtLeast, [&](int64_t begin, int64_t end) {
    if (is_by_pairs) {
      linear_outputs_by_pairs(args, begin, end);
    } else {
      KVSWAP_DISPATCH(linear_outputs)(args, begin, end);
    }
  });
}

}  // namespace kvswap
#endif  // HWY_ONCE
