#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"

namespace kvswap {

/// With a keeper whose KeeperKind::is_given: what tokens are worth to be kept, said by somebody
/// else with each append, and how that decays with each later token. Not thread-safe.
class GivenWorths {
 public:
  GivenWorths(EngineParts& parts, Batch& batch) : parts_(parts), batch_(batch) {}

  /// What the layer's newest tokens are worth. Each token's before the turn that it may be kept by.
  Status give(int64_t layer, const GivenWorth& given);
  /// Nothing must be dropped, or left on disk, of which nobody has said what it is worth. Any other
  /// keeper needs nothing.
  Status check_given(int64_t layer, int64_t part) const;
  /// mass: [sealed tokens] out, what each is worth now.
  void weigh(int64_t layer, int64_t part, std::vector<float>& mass) const;

 private:
  Status check(int64_t layer, const GivenWorth& given) const;

  EngineParts& parts_;
  Batch& batch_;
};

}  // namespace kvswap
