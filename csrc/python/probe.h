#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds DiskProbe, which tuning/probe.py drives.
void bind_probe(pybind11::module_& module);

}  // namespace kvswap
