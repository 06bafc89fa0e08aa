#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

#include "torch/session.h"

namespace kvswap {

/// SavedCache, and how a Session is saved, opened and forked. `finish` is done to each new session.
void bind_saved(pybind11::module_& module, pybind11::class_<Session>& session,
                std::function<std::unique_ptr<Session>(std::unique_ptr<Session>)> finish);

}  // namespace kvswap
