#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/retention/retained_pages.h"
#include "engine/sequence/batch.h"

namespace kvswap {

/// How many of their tokens layers keep: as many each; by shares that stand in the settings
/// (CompressKV 3.3); or by what each prompt's attention says (RetentionKind::divides_layers,
/// CAKE 4.2).
///
/// What a prompt says of a layer is known once the layer was weighed. Until all were, those that
/// were divide all there is, and give up the worst of what they keep when another comes: at no time
/// is more kept than there are pages for. Weighed all at once, layers keep the same. Not
/// thread-safe.
class LayerBudgets {
 public:
  LayerBudgets(EngineContext& context, Batch& batch, RetainedPages& retained_pages);

  /// Most tokens that a refresh of the layer may choose.
  int64_t most(int64_t layer) const { return most_[layer]; }

  /// Where a prompt says it: what was chosen (RetainedTokens::next, the best first) is kept from
  /// now on, as much of it as the layer has; other layers keep what theirs still holds. An error
  /// leaves the rest for the next call.
  Status adopt();

 private:
  Status adopt_for(int64_t sequence, const std::vector<int64_t>& tokens);
  std::vector<int64_t> tokens_of(int64_t first_part) const;
  Status adopt_in(int64_t layer, int64_t sequence, int64_t tokens);

  EngineContext& context_;
  Batch& batch_;
  RetainedPages& retained_pages_;
  std::vector<int64_t> most_;  // [layers]
};

}  // namespace kvswap
