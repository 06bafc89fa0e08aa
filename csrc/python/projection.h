#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds how projections are made: csrc/torch/projection.h, for kvswap_torch.projection.
void bind_projection(pybind11::module_& module);

}  // namespace kvswap
