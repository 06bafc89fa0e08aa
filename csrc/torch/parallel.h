#pragma once

#include "kernels/types.h"

namespace kvswap {

/// Torch's own pool of threads (at::parallel_for). The object lives as long as the program.
const ParallelFor& at_parallel_for();

}  // namespace kvswap
