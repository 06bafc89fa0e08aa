#include "methods/box_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

/// The box of one group: lows and highs, [width / 2] each; infinite where no token counts.
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

/// The element that stands for `value`, or the next larger one.
template <typename T>
T rounded_up(float value) {
  T element = from_float<T>(value);
  if (to_float(element) >= value) return element;
  // Half widths are not negative: the next larger element has the next larger bits.
  if constexpr (std::is_same_v<T, float>) {
    return std::nextafter(value, std::numeric_limits<float>::infinity());
  } else {
    ++element.bits;
    return element;
  }
}

/// Writes a row into its lane. The half width covers what rounding does to the middle.
template <typename T>
void store_box(const Box& box, T* lane) {
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
  const float scale = limit / 126.0f;
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

}  // namespace

void BoxRows::write(int64_t layer, const RowPiece& piece) const {
  const int64_t width = shape(layer).width;
  Box box;
  for (int64_t i = 0; i < piece.tokens / options().group_tokens; ++i) {
    box.lows.assign(channels(), std::numeric_limits<float>::infinity());
    box.highs.assign(channels(), -std::numeric_limits<float>::infinity());
    bool is_bounded = true;
    for_each_key(piece, i * options().group_tokens, [&](int64_t channel, float key) {
      is_bounded = is_bounded && std::isfinite(key);
      box.lows[channel] = std::min(box.lows[channel], key);
      box.highs[channel] = std::max(box.highs[channel], key);
    });
    if (!is_bounded) {
      const float largest = largest_of(options().summary_dtype);
      box.lows.assign(channels(), -largest);
      box.highs.assign(channels(), largest);
    }
    const int64_t row = piece.first_row + i;
    const int64_t lane = row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
    if (options().summary_dtype == DType::kInt8) {
      piece.row_scale[row] = store_levels(box, reinterpret_cast<int8_t*>(piece.rows) + lane);
      continue;
    }
    with_elements(piece.rows, options().summary_dtype, [&](const auto* rows) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
      if constexpr (!std::is_same_v<T, int8_t>) store_box<T>(box, const_cast<T*>(rows) + lane);
    });
  }
}

}  // namespace kvswap
