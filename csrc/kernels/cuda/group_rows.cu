#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/score_tile.cuh"

namespace kvswap::cuda {
namespace {

inline constexpr int kThreads = 128;

template <typename S>
__device__ inline float largest_number() {
  return __uint_as_float(0x7f7fffffu);
}
template <>
__device__ inline float largest_number<BFloat16>() {
  return __uint_as_float(0x7f7f0000u);
}
template <>
__device__ inline float largest_number<Float16>() {
  return 65504.0f;
}

/// The element that stands for a number that is not negative, or the next larger one.
template <typename S>
__device__ inline S rounded_up(float value) {
  S element = from_float<S>(value);
  if constexpr (sizeof(S) == 2) element.bits += to_float(element) < value ? 1 : 0;
  return element;
}

/// One channel of a group.
struct Channel {
  float low;  // above `high` where no token counts
  float high;
  float mean;
};

/// One group, whose channels the block's threads share.
template <typename K>
struct Group {
  const BatchSummarizeArgs& args;
  const GroupPiece& piece;
  int64_t number;  // of the piece's

  __device__ Channel read(int channel) const {
    const int head_dim = static_cast<int>(args.head_dim);
    const int group_tokens = static_cast<int>(args.group_tokens);
    const uint64_t counted = piece.valid ? piece.valid[number] : ~uint64_t{0};
    const K* keys = static_cast<const K*>(piece.keys) + channel / head_dim * args.head_stride +
                    number * group_tokens * args.token_stride + channel % head_dim;
    Channel found = {always(), never(), 0.0f};
    int tokens = 0;
    bool is_finite = true;
    for (int slot = 0; slot < group_tokens; ++slot) {
      if ((counted >> slot & 1) == 0) continue;
      const float key = to_float(keys[slot * args.token_stride]);
      found.low = fminf(found.low, key);
      found.high = fmaxf(found.high, key);
      found.mean += key;
      is_finite = is_finite && fabsf(key) < always();
      ++tokens;
    }
    if (!is_finite) found = {never(), always(), no_number()};
    found.mean = finite_or_nan(found.mean) / static_cast<float>(tokens > 1 ? tokens : 1);
    return found;
  }

  /// The largest magnitude over all channels of what is to be stored; infinite where one of them is
  /// not finite. Called by all threads, ends with a barrier.
  template <GroupRow kRow>
  __device__ float limit(int channels) const {
    __shared__ float of_warps[kThreads / 32];
    float most = 0.0f;
    for (int channel = static_cast<int>(threadIdx.x); channel < channels; channel += kThreads) {
      const Channel found = read(channel);
      if constexpr (kRow == GroupRow::kMean) {
        most = fmaxf(most, found.mean == found.mean ? fabsf(found.mean) : always());
      } else if (found.low <= found.high) {
        most = fmaxf(most, fmaxf(fabsf(found.low), fabsf(found.high)));
      }
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, bit));
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) most = fmaxf(most, of_warps[warp]);
    return most;
  }
};

/// Writes a channel's numbers, `second` elements apart.
template <typename S>
__device__ inline void store_box(float low, float high, S* target, int64_t second) {
  const bool is_empty = low > high;
  const S middle = from_float<S>(is_empty ? 0.0f : 0.5f * low + 0.5f * high);
  const float half = is_empty ? 0.0f : fmaxf(high - to_float(middle), to_float(middle) - low);
  target[0] = middle;
  target[second] = rounded_up<S>(half);
}

/// In levels of the row's scale, of which 126 leave room to round a half width up.
__device__ inline void store_box_levels(float low, float high, float scale, int8_t* target,
                                        int64_t second) {
  const bool is_empty = low > high || scale == 0.0f;
  const float middle = is_empty ? 0.0f : rintf((0.5f * low + 0.5f * high) / scale);
  const float half = is_empty ? 0.0f : fmaxf(high - middle * scale, middle * scale - low) / scale;
  target[0] = static_cast<int8_t>(middle);
  target[second] = static_cast<int8_t>(fminf(127.0f, ceilf(half)));
}

/// Grid: (groups, pieces).
template <typename K, typename S, GroupRow kRow>
__global__ void __launch_bounds__(kThreads) summarize(BatchSummarizeArgs args) {
  constexpr bool kIsInt8 = sizeof(S) == 1;
  constexpr bool kIsBox = kRow == GroupRow::kBox;
  const GroupPiece piece = args.pieces[blockIdx.y];
  if (blockIdx.x >= piece.groups) return;
  const Group<K> group{args, piece, static_cast<int64_t>(blockIdx.x)};
  const int channels = static_cast<int>(args.kv_heads * args.head_dim);
  // A mean of floats is its channel's own affair.
  float limit = kIsInt8 || kIsBox ? group.template limit<kRow>(channels) : 0.0f;
  const bool is_bounded = limit < always();
  if (kIsBox && !is_bounded) limit = largest_number<S>();
  const float scale = finite_or_nan(level_scale(limit, kIsBox ? 126.0f : 127.0f));
  const int64_t row = piece.first_row + blockIdx.x;
  const int64_t width = numbers_of(kRow) * channels;
  S* lane =
      static_cast<S*>(piece.summary) + row / kBlockRows * width * kBlockRows + row % kBlockRows;
  if (kIsInt8 && threadIdx.x == 0) piece.row_scale[row] = scale;
  for (int channel = static_cast<int>(threadIdx.x); channel < channels; channel += kThreads) {
    const Channel found = group.read(channel);
    S* target = lane + static_cast<int64_t>(channel) * kBlockRows;
    if constexpr (kIsBox) {
      const float low = is_bounded ? found.low : -limit;
      const float high = is_bounded ? found.high : limit;
      const int64_t second = static_cast<int64_t>(channels) * kBlockRows;
      if constexpr (kIsInt8) {
        store_box_levels(low, high, scale, target, second);
      } else {
        store_box<S>(low, high, target, second);
      }
    } else if constexpr (kIsInt8) {
      *target = static_cast<int8_t>(scale > 0.0f ? rintf(found.mean / scale) : 0.0f);
    } else {
      *target = from_float<S>(found.mean);
    }
  }
}

/// What meets rows of groups. Grid: (queries, batch).
template <typename T>
__global__ void __launch_bounds__(kThreads) ask(BatchAskArgs args) {
  const int head_dim = static_cast<int>(args.head_dim);
  const int channels = static_cast<int>(args.kv_heads) * head_dim;
  const int ratio = static_cast<int>(args.heads / args.kv_heads);
  const int64_t part = blockIdx.y % args.heads_apart;
  const T* query = static_cast<const T*>(args.query) +
                   blockIdx.y / args.heads_apart * args.batch_stride +
                   part * args.heads * args.head_stride + blockIdx.x * args.query_stride;
  float* asked =
      args.asked + (blockIdx.y * args.queries + blockIdx.x) * numbers_of(args.row) * channels;
  for (int channel = static_cast<int>(threadIdx.x); channel < channels; channel += kThreads) {
    const T* source = query + channel / head_dim * ratio * args.head_stride + channel % head_dim;
    float sum = 0.0f;
    float bound = 0.0f;
    for (int head = 0; head < ratio; ++head) {
      const float value = to_float(source[head * args.head_stride]);
      sum += value;
      bound += args.weight * fabsf(value);
    }
    asked[channel] = sum;
    if (args.row == GroupRow::kBox) asked[channels + channel] = bound;
  }
}

template <typename K, typename S>
Status launch_rows(const BatchSummarizeArgs& args, void* stream) {
  const Grid grid = {.x = args.groups_max, .y = args.count};
  return launch("summarize_groups", stream, grid, kThreads,
                args.row == GroupRow::kBox ? summarize<K, S, GroupRow::kBox>
                                           : summarize<K, S, GroupRow::kMean>,
                args);
}

}  // namespace

Status summarize_groups(const BatchSummarizeArgs& args, void* stream) {
  constexpr const char* kWhere = "summarize_groups";
  KVSWAP_RETURN_IF_ERROR(check_range(kWhere, "group_tokens", args.group_tokens, 1, 64));
  KVSWAP_RETURN_IF_ERROR(check_floating(kWhere, args.key_dtype));
  if (args.summary_dtype == DType::kInt4) {
    return Status::invalid(
        "summarize_groups: summary_dtype must not be int4, which has no kernels");
  }
  return with_floating(args.key_dtype, [&](auto key) {
    using K = typename decltype(key)::Type;
    return with_summary_type(args.summary_dtype, [&](auto row) {
      return launch_rows<K, typename decltype(row)::Type>(args, stream);
    });
  });
}

Status ask_groups(const BatchAskArgs& args, void* stream) {
  KVSWAP_RETURN_IF_ERROR(check_floating("ask_groups", args.dtype));
  const Grid grid = {.x = args.queries, .y = args.batch};
  return with_floating(args.dtype, [&](auto type) {
    return launch("ask_groups", stream, grid, kThreads, ask<typename decltype(type)::Type>, args);
  });
}

}  // namespace kvswap::cuda
