#include "methods/box_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/element.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

/// Calls body with a pointer to elements of the dtype's type.
template <typename Body>
void with_elements(const void* data, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<const float*>(data));
    case DType::kBFloat16:
      return body(static_cast<const BFloat16*>(data));
    case DType::kFloat16:
      return body(static_cast<const Float16*>(data));
    case DType::kInt8:
      return body(static_cast<const int8_t*>(data));
  }
}

/// The box of one group: lows and highs, [width / 2] each; infinite where no token counts.
struct Box {
  std::vector<float> lows;
  std::vector<float> highs;
};

void find_box(const MethodOptions& options, const RowPiece& piece, int64_t first_token, Box& box) {
  const int64_t channels = options.kv_heads * options.head_dim;
  box.lows.assign(channels, std::numeric_limits<float>::infinity());
  box.highs.assign(channels, -std::numeric_limits<float>::infinity());
  with_elements(piece.keys.data, piece.keys.dtype, [&](const auto* keys) {
    for (int64_t token = first_token; token < first_token + options.group_tokens; ++token) {
      if (piece.valid != nullptr && !piece.valid->is_valid(piece.first_token + token)) continue;
      for (int64_t channel = 0; channel < channels; ++channel) {
        const int64_t head = channel / options.head_dim;
        const float key =
            to_float(keys[head * piece.keys.head_stride + token * piece.keys.token_stride +
                          channel % options.head_dim]);
        box.lows[channel] = std::min(box.lows[channel], key);
        box.highs[channel] = std::max(box.highs[channel], key);
      }
    }
  });
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
  for (int64_t i = 0; i < piece.tokens / options_.group_tokens; ++i) {
    find_box(options_, piece, i * options_.group_tokens, box);
    const int64_t row = piece.first_row + i;
    const int64_t lane = row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
    if (options_.summary_dtype == DType::kInt8) {
      piece.row_scale[row] = store_levels(box, reinterpret_cast<int8_t*>(piece.rows) + lane);
      continue;
    }
    with_elements(piece.rows, options_.summary_dtype, [&](const auto* rows) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
      if constexpr (!std::is_same_v<T, int8_t>) store_box<T>(box, const_cast<T*>(rows) + lane);
    });
  }
}

void BoxRows::ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const {
  const int64_t width = shape(layer).width;
  const int64_t heads_each = query.heads / options_.kv_heads;
  std::fill_n(asked, batch * query.queries * width, 0.0f);
  for (int64_t row = 0; row < batch * query.queries; ++row) {
    float* sums = asked + row * width;
    for (int64_t head = 0; head < query.heads; ++head) {
      const int64_t first = head / heads_each * options_.head_dim;
      const void* data = query.at(row / query.queries, head, row % query.queries);
      with_elements(data, query.dtype, [&](const auto* values) {
        for (int64_t d = 0; d < options_.head_dim; ++d) {
          const float value = to_float(values[d]);
          sums[first + d] += value;
          sums[width / 2 + first + d] += std::fabs(value);
        }
      });
    }
  }
}

}  // namespace kvswap
