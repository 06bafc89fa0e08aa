#pragma once

#include <memory>

#include "engine/engine.h"
#include "kvswap/saved_cache.h"

namespace kvswap {

// What both sessions do to be saved, opened and forked. Each throws as throw_status() does.

/// Writes the folder that args names; the session goes on.
void save_engine(Engine& engine, const CacheOptions& options, const SaveArgs& args);

/// An engine that goes on from a saved one. `options` are its options(), perhaps with other
/// promises, reader and threads.
std::unique_ptr<Engine> open_engine(const SavedCache& saved, const CacheOptions& options,
                                    ParallelFor parallel);

/// An engine that goes on from another one of this process, which goes on as well.
std::unique_ptr<Engine> fork_engine(Engine& engine, ParallelFor parallel);

}  // namespace kvswap
