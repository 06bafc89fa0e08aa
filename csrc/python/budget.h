#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Adds settings from a budget: csrc/kvswap/budget.h, for kvswap_torch.sizing.
void bind_budget(pybind11::module_& module);

}  // namespace kvswap
