#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds what the tuner and benchmarks replay choices with: the engine's own rules of who leaves
/// memory and which reads are merged.
void bind_replay(pybind11::module_& module);

}  // namespace kvswap
