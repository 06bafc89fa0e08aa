#include "io/read_coalescing.h"

#include <algorithm>

namespace kvswap {

void MergedReads::build(std::span<Placement> placements, const MergeOptions& options) {
  std::sort(placements.begin(), placements.end(),
            [](const Placement& a, const Placement& b) { return a.offset_bytes < b.offset_bytes; });
  reads_.clear();
  targets_.clear();
  gap_bytes_ = 0;
  // A record and a gap each: the spans below point into this vector, so it must not move.
  targets_.reserve(2 * placements.size());

  const int64_t gap_max = options.discard_buffer != nullptr ? options.gap_bytes_max : 0;
  size_t first_target = 0;
  int64_t start = 0;
  int64_t end = 0;
  const auto close_read = [&] {
    const size_t count = targets_.size() - first_target;
    if (count > 0) reads_.push_back({start, {targets_.data() + first_target, count}});
  };
  const auto add_target = [&](void* base, int64_t length, bool may_extend) {
    if (may_extend && targets_.size() > first_target) {
      iovec& last = targets_.back();
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == base) {
        last.iov_len += static_cast<size_t>(length);
        return;
      }
    }
    targets_.push_back({base, static_cast<size_t>(length)});
  };

  for (const Placement& placement : placements) {
    const int64_t gap = placement.offset_bytes - end;
    const bool first = targets_.empty();
    KVSWAP_ASSERT(first || gap >= 0);
    const int64_t merged = placement.offset_bytes + placement.length_bytes - start;
    const size_t targets_needed = targets_.size() - first_target + (gap > 0 ? 2 : 1);
    const bool retains_online = !first && gap <= gap_max && merged <= options.merged_bytes_max &&
                                targets_needed <= static_cast<size_t>(kTargetsMax);
    if (!retains_online) {
      close_read();
      first_target = targets_.size();
      start = placement.offset_bytes;
    } else if (gap > 0) {
      add_target(options.discard_buffer, gap, false);
      gap_bytes_ += gap;
    }
    add_target(placement.target, placement.length_bytes, retains_online && gap == 0);
    end = placement.offset_bytes + placement.length_bytes;
  }
  close_read();
}

}  // namespace kvswap
