#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/snapshot/parent_files.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Of a layer's retained tokens, for a saved session or a fork: of each sequence how long its state
/// is (retained_to_bytes()) and how many pages it has, then all of these.
void list_retained(EngineContext& context, Batch& batch, int64_t layer,
                   std::vector<SavedTensor>& tensors);

struct RetainedPlace {
  int64_t layer = 0;
  const SavedCounts& counts;
};
/// The way back, into a batch that retains nothing yet; everything is checked.
Status load_retained(EngineContext& context, Batch& batch, const RetainedPlace& place,
                     const SavedTensors& saved);

}  // namespace kvswap
