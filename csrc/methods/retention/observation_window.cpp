#include "methods/retention/observation_window.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/status.h"

namespace kvswap {

int64_t ObservationWindow::in_a_row(int64_t query) const {
  return slots == 0 ? count - query : std::min(count - query, slots - slot(query));
}

void ObservationWindow::truncate(int64_t positions) {
  count = std::clamp<int64_t>(positions - first_position, 0, count);
  first_position = std::min(first_position, positions);
}

void ObservationWindow::make_ring(const Decoded& decoded, int64_t most) {
  KVSWAP_ASSERT(count <= most);
  const int64_t row = decoded.row_bytes;
  std::vector<std::byte> ring(decoded.heads * most * row);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t head = 0; head < decoded.heads; ++head) {
      const int64_t stride = static_cast<int64_t>(queries.size()) / decoded.heads;
      std::memcpy(ring.data() + (head * most + i) * row,
                  queries.data() + head * stride + slot(i) * row, row);
    }
  }
  queries = std::move(ring);
  slots = most;
  begin = 0;
}

void ObservationWindow::add(const Decoded& decoded, int64_t most) {
  truncate(decoded.first_position);
  if (first_position + count != decoded.first_position) count = 0;
  if (slots != most) make_ring(decoded, most);
  log_sum_exp = {};
  if (count == 0) first_position = decoded.first_position;
  for (int64_t i = 0; i < decoded.count; ++i) {
    if (count == most) {
      begin = (begin + 1) % slots;
      ++first_position;
    } else {
      ++count;
    }
    for (int64_t head = 0; head < decoded.heads; ++head) {
      std::memcpy(queries.data() + (head * slots + slot(count - 1)) * decoded.row_bytes,
                  decoded.queries + head * decoded.head_stride + i * decoded.query_stride,
                  decoded.row_bytes);
    }
  }
}

}  // namespace kvswap
