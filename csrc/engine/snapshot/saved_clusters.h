#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"
#include "engine/snapshot/parent_files.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Of a layer's clusters, for a saved session or a fork: which token is in which, and where it
/// stands; what they are by; their pages' records, as `numbers` has those of the store; and the
/// tokens that wait. All that is sealed has entered them.
void list_clusters(EngineContext& context, Batch& batch, int64_t layer,
                   const std::shared_ptr<const std::vector<uint32_t>>& numbers,
                   std::vector<SavedTensor>& tensors);

/// The way back, into a batch whose clusters hold nothing yet; everything is checked. Which records
/// their pages have goes to tables.pages, for the store.
Status load_clusters(EngineContext& context, Batch& batch, const SavedCounts& counts,
                     const SavedTensors& saved, SavedTables& tables);
/// Room that each row of a layer had: how many clusters may be made goes by it. A layer without
/// clusters has none.
Result<int64_t> saved_cluster_room(const EngineContext& context, int64_t layer,
                                   const SavedCounts& counts, const SavedTensors& saved);
/// Of a batch whose tables are there: tokens that wait.
Status load_waiting(EngineContext& context, Batch& batch, int64_t layer, const SavedTensors& saved);

/// Slots of a row that hold a record, as pages are named, rising in the slot.
std::vector<int64_t> cluster_page_ids(const ClusterRow& row);

/// Reads every page of a layer's clusters, and says what is damaged.
Status verify_clusters(EngineContext& context, Batch& batch, PrefixReader& past, int64_t layer);

}  // namespace kvswap
