#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "io/status.h"
#include "kvswap/cache_options.h"
#include "kvswap/tokens.h"

namespace kvswap {

/// Throws what `status` says: std::invalid_argument for a wrong call, SessionError otherwise.
void throw_status(const Status& status);

EngineOptions engine_options(const CacheOptions& options);

QueryView query_view(const Queries& query, DType dtype);

KeyValueView key_value_view(const NewTokens& tokens);

}  // namespace kvswap
