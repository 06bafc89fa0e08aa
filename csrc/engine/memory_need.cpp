#include "engine/memory_need.h"

#include <algorithm>

#include "engine/account.h"
#include "engine/audit.h"
#include "engine/batch.h"
#include "engine/clustering.h"
#include "engine/editor.h"
#include "engine/engine_parts.h"
#include "engine/exact_chunks.h"
#include "engine/keeping.h"
#include "engine/layer_steps.h"
#include "engine/page_scores.h"
#include "engine/page_table.h"
#include "engine/past_reader.h"
#include "engine/sealer.h"

namespace kvswap {
namespace {

/// In the parts' sequences.
Extent extent_of(const Plan& plan, const EngineOptions& options, int64_t batch, int64_t context) {
  const int64_t apart = plan.options.heads_apart / options.heads_apart;
  return {size_product({std::min(batch, kTooManyBytes), apart}), std::min(context, kTooManyBytes)};
}

}  // namespace

Arena memory_need(const Plan& plan, const Extent& extent) {
  Arena arena;
  Batch::reserve(arena, plan, extent);
  LayerSteps::reserve(arena, plan, extent);
  PageTable::reserve(arena, plan, extent);
  PastReader::reserve(arena, plan);
  ExactChunks::reserve(arena, plan);
  Sealer::reserve(arena, plan);
  Editor::reserve(arena, plan, extent);
  Clustering::reserve(arena, plan, extent);
  Keeping::reserve(arena, plan, extent);
  Audit::reserve(arena, plan, extent);
  PageScores::reserve(arena, plan, extent);
  Account::reserve(arena, plan, extent);
  EngineParts::reserve(arena, plan, extent);
  return arena;
}

Arena memory_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                  int64_t context) {
  const Plan plan(options, record_bytes);
  return memory_need(plan, extent_of(plan, options, batch, context));
}

int64_t least_budget(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                     int64_t context) {
  const Plan plan(options, record_bytes);
  return least_budget(plan, extent_of(plan, options, batch, context), memory_need);
}

}  // namespace kvswap
