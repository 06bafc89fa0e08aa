#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds Clusters, which bench/quality follows documents with.
void bind_clusters(pybind11::module_& module);

}  // namespace kvswap
