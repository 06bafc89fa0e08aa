#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds AdaptiveClusters, which tests compare with the reference.
void bind_clusters(pybind11::module_& module);

}  // namespace kvswap
