#pragma once

#include <algorithm>
#include <cstdint>

namespace kvswap {

/// Token slots that mass is weighed for, cut into units of work. Units depend on the sizes alone,
/// so that the result does not depend on the number of threads.
struct MassUnits {
  static constexpr int64_t kSlots = 512;  // of a unit, about

  /// Of `heads` KV heads of all sequences, each with `pages` of `page_slots` slots.
  MassUnits(int64_t heads, int64_t pages, int64_t page_slots)
      : pages_each(std::max<int64_t>(1, kSlots / page_slots)),
        parts((pages + pages_each - 1) / pages_each),
        count(heads * parts) {}

  int64_t pages_each;
  int64_t parts;  // of a KV head
  int64_t count;  // ((sequence * kv_heads) + KV head) * parts + part
};

}  // namespace kvswap
