#pragma once

#include <cstdint>
#include <vector>

#include "engine/base_files.h"
#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Of a layer's retained tokens, for a saved session or a fork: of each sequence how long its state
/// is (kept_to_bytes()) and how many pages it has, then all of these.
void list_kept(EngineParts& parts, Batch& batch, int64_t layer, std::vector<SavedTensor>& tensors);

struct KeptPlace {
  int64_t layer = 0;
  const SavedCounts& counts;
};
/// The way back, into a batch that retains nothing yet; everything is checked.
Status load_kept(EngineParts& parts, Batch& batch, const KeptPlace& place,
                 const SavedTensors& saved);

}  // namespace kvswap
