#include "engine/memory/memory_estimate.h"

#include <algorithm>

#include "engine/clusters/cluster_updater.h"
#include "engine/engine_context.h"
#include "engine/memory/memory_reservations.h"
#include "engine/prefill/chunked_prefill.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/retention/retention_manager.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/sequence_editor.h"
#include "engine/step/page_attention.h"
#include "engine/step/page_table.h"
#include "engine/step/recall_audit.h"
#include "engine/step/step_coordinator.h"

namespace kvswap {
namespace {

/// In the logical sequences.
Extent extent_of(const Plan& plan, const EngineOptions& options, int64_t batch, int64_t context) {
  const int64_t apart = plan.options.heads_apart / options.heads_apart;
  return {size_product({std::min(batch, kTooManyBytes), apart}), std::min(context, kTooManyBytes)};
}

}  // namespace

Arena memory_need(const Plan& plan, const Extent& extent) {
  Arena arena;
  Batch::reserve(arena, plan, extent);
  StepCoordinator::reserve(arena, plan, extent);
  PageTable::reserve(arena, plan, extent);
  PrefixReader::reserve(arena, plan);
  ChunkedPrefill::reserve(arena, plan);
  Sealer::reserve(arena, plan);
  SequenceEditor::reserve(arena, plan);
  ClusterUpdater::reserve(arena, plan, extent);
  RetentionManager::reserve(arena, plan, extent);
  RecallAudit::reserve(arena, plan, extent);
  PageAttention::reserve(arena, plan, extent);
  MemoryReservations::reserve(arena, plan, extent);
  EngineContext::reserve(arena, plan, extent);
  return arena;
}

Arena memory_need(const EngineOptions& options, int64_t stored_bytes, int64_t batch,
                  int64_t context) {
  const Plan plan(options, stored_bytes);
  return memory_need(plan, extent_of(plan, options, batch, context));
}

int64_t least_budget(const EngineOptions& options, int64_t stored_bytes, int64_t batch,
                     int64_t context) {
  const Plan plan(options, stored_bytes);
  return least_budget(plan, extent_of(plan, options, batch, context), memory_need);
}

}  // namespace kvswap
