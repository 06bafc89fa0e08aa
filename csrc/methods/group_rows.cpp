#include "methods/group_rows.h"

#include <algorithm>
#include <cmath>

namespace kvswap {

/// One head's query, at its KV head's channels.
void GroupRows::add_head(const QueryView& query, int64_t row, int64_t head, float scale,
                         float* sums) const {
  const int64_t first = head / (query.heads / options_.kv_heads) * options_.head_dim;
  const auto weight = static_cast<float>(options_.bound_weight);
  const void* data = query.at(row / query.queries, head, row % query.queries);
  with_elements(data, query.dtype, [&](const auto* values) {
    for (int64_t d = 0; d < options_.head_dim; ++d) {
      const float value = scale * to_float(values[d]);
      sums[first + d] += value;
      if (numbers_ == 2) sums[channels() + first + d] += weight * std::fabs(value);
    }
  });
}

void GroupRows::ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const {
  const int64_t width = shape(layer).width;
  std::fill_n(asked, batch * query.queries * width, 0.0f);
  for (int64_t row = 0; row < batch * query.queries; ++row) {
    for (int64_t head = 0; head < query.heads; ++head) {
      add_head(query, row, head, 1.0f, asked + row * width);
    }
  }
}

void GroupRows::ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                              float* asked) const {
  const int64_t width = shape(layer).width;
  std::fill_n(asked, batch * query.queries * query.heads * width, 0.0f);
  for (int64_t row = 0; row < batch * query.queries; ++row) {
    for (int64_t head = 0; head < query.heads; ++head) {
      add_head(query, row, head, scale, asked + (row * query.heads + head) * width);
    }
  }
}

}  // namespace kvswap
