#include "kernels/linear_rows.h"

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
  const auto add = [&](const auto& load_from) {
    Floats parts[kRows];
    KVSWAP_UNROLL
    for (int r = 0; r < kRows; ++r) parts[r] = load_from(input + r * args.inputs);
    KVSWAP_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      const Floats weights = load_from(weight + o * args.inputs);
      KVSWAP_UNROLL
      for (int r = 0; r < kRows; ++r) sums[o][r] = multiply_add(weights, parts[r], sums[o][r]);
    }
  };
  int64_t at = 0;
  for (; at + kLanes <= args.inputs; at += kLanes) {
    add([&](const T* source) { return load(source + at); });
  }
  if (const int64_t left = args.inputs - at; left > 0) {
    add([&](const T* source) { return load_some(source + at, left); });
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

void linear_outputs(const LinearRowsArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() {
    int64_t output = begin;
    for (; output + kTileOutputs <= end; output += kTileOutputs) {
      multiply_rows<T, kTileOutputs>(args, output);
    }
    for (; output < end; ++output) multiply_rows<T, 1>(args, output);
  });
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
