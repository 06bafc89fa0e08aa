#pragma once

#include <torch/csrc/utils/pybind.h>

#include "torch/tensor_cache.h"

namespace kvswap {

/// SavedCache, and how a cache is saved and forked.
void bind_saved(pybind11::module_& module, pybind11::class_<TensorCache>& cache);

}  // namespace kvswap
