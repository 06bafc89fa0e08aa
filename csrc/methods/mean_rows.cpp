#include "methods/mean_rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

/// Levels of the row's own scale, which is returned: NaN where a mean is not finite.
float store_levels(const std::vector<float>& means, int8_t* lane) {
  float limit = 0;
  bool is_finite = true;
  for (const float mean : means) {
    limit = std::max(limit, std::fabs(mean));
    is_finite = is_finite && std::isfinite(mean);
  }
  const float scale = is_finite ? limit / 127.0f : NAN;
  for (size_t channel = 0; channel < means.size(); ++channel) {
    const float level = scale > 0.0f ? std::nearbyint(means[channel] / scale) : 0.0f;
    lane[channel * kSummaryBlock] = static_cast<int8_t>(level);
  }
  return scale;
}

}  // namespace

void MeanRows::write(int64_t layer, const RowPiece& piece) const {
  const int64_t width = shape(layer).width;
  std::vector<float> means;
  for (int64_t i = 0; i < piece.tokens / options().group_tokens; ++i) {
    means.assign(width, 0.0f);
    int64_t keys = 0;
    for_each_key(piece, i * options().group_tokens, [&](int64_t channel, float key) {
      means[channel] += key;
      ++keys;
    });
    const int64_t tokens = std::max<int64_t>(1, keys / width);
    for (float& mean : means) mean /= static_cast<float>(tokens);
    const int64_t row = piece.first_row + i;
    const int64_t lane = row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
    if (options().summary_dtype == DType::kInt8) {
      piece.row_scale[row] = store_levels(means, reinterpret_cast<int8_t*>(piece.rows) + lane);
      continue;
    }
    with_elements(piece.rows, options().summary_dtype, [&](const auto* rows) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
      if constexpr (!std::is_same_v<T, int8_t>) {
        T* target = const_cast<T*>(rows) + lane;
        for (int64_t c = 0; c < width; ++c) {
          const float mean = std::isfinite(means[c]) ? means[c] : NAN;
          target[c * kSummaryBlock] = from_float<T>(mean);
        }
      }
    });
  }
}

}  // namespace kvswap
