#pragma once

#include <torch/csrc/utils/pybind.h>

namespace kvswap {

/// Python sees kvswap_torch.errors' classes for SessionError.
void register_errors();

}  // namespace kvswap
