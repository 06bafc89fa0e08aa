#include "kernels/group_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/cpu/element.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// body(channel, key) for each key of a group that counts.
template <typename Body>
void for_each_key(const SummarizeGroupsArgs& args, int64_t group, const Body& body) {
  const uint64_t counted = args.valid == nullptr ? ~uint64_t{0} : args.valid[group];
  with_elements(args.keys, args.key_dtype, [&](const auto* keys) {
    for (int64_t slot = 0; slot < args.group_tokens; ++slot) {
      if ((counted >> slot & 1) == 0) continue;
      const int64_t token = group * args.group_tokens + slot;
      for (int64_t head = 0; head < args.kv_heads; ++head) {
        const auto* key = keys + head * args.head_stride + token * args.token_stride;
        for (int64_t d = 0; d < args.head_dim; ++d)
          body(head * args.head_dim + d, to_float(key[d]));
      }
    }
  });
}

/// The box of one group: lows and highs, [channels] each; infinite where no token counts.
struct Box {
  std::vector<float> lows;
  std::vector<float> highs;
};

/// The largest finite number of a summary's elements.
float largest_of(DType dtype) {
  if (dtype == DType::kFloat16) return 65504.0f;
  if (dtype == DType::kBFloat16) return 0x1.fep127f;
  return std::numeric_limits<float>::max();
}

void measure(const SummarizeGroupsArgs& args, int64_t group, Box& box) {
  const int64_t channels = args.kv_heads * args.head_dim;
  box.lows.assign(channels, kInfinity);
  box.highs.assign(channels, -kInfinity);
  bool is_bounded = true;
  for_each_key(args, group, [&](int64_t channel, float key) {
    is_bounded = is_bounded && std::isfinite(key);
    box.lows[channel] = std::min(box.lows[channel], key);
    box.highs[channel] = std::max(box.highs[channel], key);
  });
  if (is_bounded) return;
  const float largest = largest_of(args.summary_dtype);
  box.lows.assign(channels, -largest);
  box.highs.assign(channels, largest);
}

/// The element that stands for `value`, or the next larger one.
template <typename T>
T rounded_up(float value) {
  T element = from_float<T>(value);
  if (to_float(element) >= value) return element;
  // Half widths are not negative: the next larger element has the next larger bits.
  if constexpr (std::is_same_v<T, float>) {
    return std::nextafter(value, kInfinity);
  } else {
    ++element.bits;
    return element;
  }
}

/// Writes a row into its lane. The half width covers what rounding does to the middle.
template <typename T>
void store(const Box& box, T* lane) {
  const auto channels = static_cast<int64_t>(box.lows.size());
  for (int64_t channel = 0; channel < channels; ++channel) {
    const float low = box.lows[channel];
    const float high = box.highs[channel];
    const bool is_empty = low > high;
    const T middle = from_float<T>(is_empty ? 0.0f : 0.5f * low + 0.5f * high);
    const float half = is_empty ? 0.0f : std::max(high - to_float(middle), to_float(middle) - low);
    lane[channel * kSummaryBlock] = middle;
    lane[(channels + channel) * kSummaryBlock] = rounded_up<T>(half);
  }
}

/// The same in levels of the row's own scale.
float store_levels(const Box& box, int8_t* lane) {
  const auto channels = static_cast<int64_t>(box.lows.size());
  float limit = 0;
  for (int64_t channel = 0; channel < channels; ++channel) {
    if (box.lows[channel] > box.highs[channel]) continue;
    limit = std::max({limit, std::fabs(box.lows[channel]), std::fabs(box.highs[channel])});
  }
  // A half width is at most the limit and half a level: 126 levels leave room to round it up.
  const float scale = level_scale(limit, 126.0f);
  for (int64_t channel = 0; channel < channels; ++channel) {
    const float low = box.lows[channel];
    const float high = box.highs[channel];
    const bool is_empty = low > high || scale == 0.0f;
    const float middle = is_empty ? 0.0f : std::nearbyint((0.5f * low + 0.5f * high) / scale);
    const float half =
        is_empty ? 0.0f : std::max(high - middle * scale, middle * scale - low) / scale;
    lane[channel * kSummaryBlock] = static_cast<int8_t>(middle);
    lane[(channels + channel) * kSummaryBlock] =
        static_cast<int8_t>(std::min(127.0f, std::ceil(half)));
  }
  return scale;
}

using Means = std::vector<float>;

void measure(const SummarizeGroupsArgs& args, int64_t group, Means& means) {
  const int64_t channels = args.kv_heads * args.head_dim;
  means.assign(channels, 0.0f);
  int64_t keys = 0;
  for_each_key(args, group, [&](int64_t channel, float key) {
    means[channel] += key;
    ++keys;
  });
  const auto tokens = static_cast<float>(std::max<int64_t>(1, keys / channels));
  for (float& mean : means) mean = std::isfinite(mean) ? mean / tokens : NAN;
}

template <typename T>
void store(const Means& means, T* lane) {
  for (size_t channel = 0; channel < means.size(); ++channel) {
    lane[channel * kSummaryBlock] = from_float<T>(means[channel]);
  }
}

float store_levels(const Means& means, int8_t* lane) {
  float limit = 0;
  bool is_finite = true;
  for (const float mean : means) {
    limit = std::max(limit, std::fabs(mean));
    is_finite = is_finite && std::isfinite(mean);
  }
  const float scale = is_finite ? level_scale(limit, 127.0f) : NAN;
  for (size_t channel = 0; channel < means.size(); ++channel) {
    const float level = scale > 0.0f ? std::nearbyint(means[channel] / scale) : 0.0f;
    lane[channel * kSummaryBlock] = static_cast<int8_t>(level);
  }
  return scale;
}

template <typename Measured>
void summarize(const SummarizeGroupsArgs& args) {
  const int64_t width = numbers_of(args.row) * args.kv_heads * args.head_dim;
  Measured measured;
  for (int64_t group = 0; group < args.groups; ++group) {
    measure(args, group, measured);
    const int64_t row = args.first_row + group;
    const int64_t lane = row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
    with_elements(args.summary, args.summary_dtype, [&](const auto* rows) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
      T* target = const_cast<T*>(rows) + lane;
      if constexpr (std::is_same_v<T, int8_t>) {
        args.row_scale[row] = store_levels(measured, target);
      } else {
        store<T>(measured, target);
      }
    });
  }
}

}  // namespace

void summarize_groups(const SummarizeGroupsArgs& args) {
  args.row == GroupRow::kBox ? summarize<Box>(args) : summarize<Means>(args);
}

void ask_groups(const AskGroupsArgs& args) {
  const int64_t channels = args.kv_heads * args.head_dim;
  std::fill_n(args.asked, numbers_of(args.row) * channels, 0.0f);
  for (int64_t head = args.first_head; head < args.last_head; ++head) {
    const int64_t first = head / (args.heads / args.kv_heads) * args.head_dim;
    with_elements(args.query, args.dtype, [&](const auto* values) {
      for (int64_t d = 0; d < args.head_dim; ++d) {
        const float value = args.scale * to_float(values[head * args.head_stride + d]);
        args.asked[first + d] += value;
        if (args.row == GroupRow::kBox) {
          args.asked[channels + first + d] += args.weight * std::fabs(value);
        }
      }
    });
  }
}

}  // namespace kvswap
