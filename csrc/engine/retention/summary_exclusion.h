#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"

namespace kvswap {

/// Rows of groups that leave retained tokens out: what is selected is selected for the others
/// (PRKV, algorithm 1, lines 9 to 14; records stay as they are).
///
/// Used after each refresh of a retained set: rows of groups that gained or lost a retained token
/// are made again, of records that are read for it. RetainedTokens::excluded says what rows leave
/// out, so that an update that failed is continued by the next one. Not thread-safe.
class SummaryExclusion {
 public:
  SummaryExclusion(EngineContext& context, Batch& batch, Sealer& sealer, PrefixReader& past)
      : context_(context), batch_(batch), sealer_(sealer), past_(past) {}

  /// Makes the rows fit what is retained now. With another setting: nothing.
  Status update(int64_t layer, int64_t sequence);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  void find_changed(const RetainedTokens& retained);
  Status rewrite(int64_t layer, int64_t sequence, std::span<const int32_t> groups);

  EngineContext& context_;
  Batch& batch_;
  Sealer& sealer_;
  PrefixReader& past_;
  std::vector<int32_t> changed_;  // groups, rising
  std::vector<std::byte> room_;   // [group_bytes]
  Fetch fetch_;
};

}  // namespace kvswap
