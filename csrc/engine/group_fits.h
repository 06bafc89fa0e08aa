#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/past_reader.h"

namespace kvswap {

/// For a keeper whose KeeperKind::keeps_outliers: how badly groups' means stand for their keys,
/// found out by reading the layer's records once. Not thread-safe.
class GroupFits {
 public:
  GroupFits(EngineParts& parts, Batch& batch, PastReader& past)
      : parts_(parts), batch_(batch), past_(past) {}

  /// mass: [sealed tokens] out, all tokens of a group alike: outlier_worth().
  Status weigh(int64_t layer, int64_t part, std::vector<float>& mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  EngineParts& parts_;
  Batch& batch_;
  PastReader& past_;
  PastPages listed_;
  std::vector<std::byte> room_;  // [group_bytes]: of a group that is decoded
};

}  // namespace kvswap
