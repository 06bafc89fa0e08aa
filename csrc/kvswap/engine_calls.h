#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "io/status.h"
#include "kvswap/core_session.h"

namespace kvswap {

/// Throws what `status` says: std::invalid_argument for a wrong call, SessionError otherwise.
void throw_status(const Status& status);

EngineOptions engine_options(const CoreOptions& options);

QueryView query_view(const Queries& query, DType dtype);

KeyValueView key_value_view(const NewTokens& tokens);

/// Exact attention of a long chunk over everything before it and causally over itself, with the
/// paged kernel: sealed groups stream through in blocks, what is newer is read back at once; parts
/// are merged by log-sum-exp in fp32, and sinks come last.
Status attend_exactly(Engine& engine, const AttendArgs& args, const ParallelFor& parallel);

}  // namespace kvswap
