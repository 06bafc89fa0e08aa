#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"

namespace kvswap {

/// What a policy with ScoredBy::kKeys scores a prompt's tokens by their keys, which are read from
/// the layer's records once. Not thread-safe.
class KeyScorer {
 public:
  KeyScorer(EngineContext& context, Batch& batch, PrefixReader& past)
      : context_(context), batch_(batch), past_(past) {}

  /// mass: [sealed tokens] out; groups of padding alone score 0.
  Status score(int64_t layer, int64_t sequence, std::vector<float>& mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  EngineContext& context_;
  Batch& batch_;
  PrefixReader& past_;
  PrefixPages listed_;
  std::vector<std::byte> room_;  // [group_bytes]: of a group that is decoded
};

}  // namespace kvswap
