#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/observe_keys.h"
#include "kernels/paged_attention.h"

namespace kvswap {

/// Token slots that mass is weighed for, cut into units of work. Units depend on the sizes alone,
/// so that the result does not depend on the number of threads.
struct MassUnits {
  static constexpr int64_t kTablesEnough = 8;  // from which a table is hardly cut

  /// Of each of `tables`: `pages` of `page_slots` slots, in units of about `slots`.
  MassUnits(int64_t tables, int64_t pages, int64_t page_slots, int64_t slots)
      : pages_each(std::max<int64_t>(1, slots / page_slots)),
        parts((pages + pages_each - 1) / pages_each),
        count(tables * parts) {}
  explicit MassUnits(const PagedAttentionArgs& args)
      : MassUnits(args.batch * args.table_heads, args.pages_max, args.shape.group_tokens,
                  args.batch * args.table_heads < kTablesEnough ? 128 : 1024) {}
  explicit MassUnits(const ObserveKeysArgs& args)
      : MassUnits(args.batch * args.kv_heads, args.tokens, 1, 512) {}

  int64_t pages_each;
  int64_t parts;  // of a table
  int64_t count;  // table * parts + part
};

}  // namespace kvswap
