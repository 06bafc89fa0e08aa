#pragma once

#include <cstdint>

#include "engine/plan.h"
#include "memory/arena.h"

namespace kvswap {

/// Bytes by use at a given batch and context: what every part of an engine reserves. The sum is
/// what kv_memory_bytes must cover, host and device memory alike.
Arena memory_need(const Plan& plan, const Extent& extent);

/// The same of options, whose own sequences a batch is of.
Arena memory_need(const EngineOptions& options, int64_t stored_bytes, int64_t batch,
                  int64_t context);
/// The smallest kv_memory_bytes that holds what these options need under it.
int64_t least_budget(const EngineOptions& options, int64_t stored_bytes, int64_t batch,
                     int64_t context);

}  // namespace kvswap
