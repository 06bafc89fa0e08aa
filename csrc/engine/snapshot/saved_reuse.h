#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/snapshot/parent_files.h"
#include "engine/step/step_coordinator.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Which records stand in the reuse buffers of a session that selects clusters, for a saved one or
/// a fork: a cluster is packed anew when its pages are in memory, so that what is selected later
/// goes by it.
/// What layers chose last is among it: some of it is read ahead of the next choice.
void list_reuse(EngineContext& context, Batch& batch, StepCoordinator& steps,
                std::vector<SavedTensor>& tensors);

/// The way back, into a batch whose tables and clusters are there: everything is checked, and the
/// records are read. Where the session has other reuse buffers than the one that was saved they
/// begin empty.
Status load_reuse(EngineContext& context, Batch& batch, StepCoordinator& steps,
                  const SavedCounts& counts, const SavedTensors& saved);

}  // namespace kvswap
