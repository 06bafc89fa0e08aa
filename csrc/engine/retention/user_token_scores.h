#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "methods/retention/user_retention.h"

namespace kvswap {

/// The user's importance of each layer's newest tokens, and how it decays with each later token,
/// for a policy with ScoredBy::kUser: set with each append. Not thread-safe.
class UserTokenScores {
 public:
  UserTokenScores(EngineContext& context, Batch& batch) : context_(context), batch_(batch) {}

  /// Sets the importance of the layer's newest tokens. Each token's comes before the refresh that
  /// may retain it.
  Status give(int64_t layer, const TokenScores& given);
  /// Sets that of all tokens anew. Nothing comes due by it: the next refresh goes by it.
  Status replace(int64_t layer, const TokenScores& given);
  /// An error if a token on disk, or one that would be discarded, has no importance. Other policies
  /// need none.
  Status check_given(int64_t layer, int64_t sequence) const;
  /// mass: [sealed tokens] out, the importance that each has now.
  void score(int64_t layer, int64_t sequence, std::vector<float>& mass) const;

 private:
  Status check(int64_t layer, const TokenScores& given) const;

  EngineContext& context_;
  Batch& batch_;
};

}  // namespace kvswap
