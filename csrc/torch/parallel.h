#pragma once

#include "kernels/types.h"

namespace kvswap {

/// Torch's own pool of threads (at::parallel_for). The object lives as long as the program.
const ParallelFor& at_parallel_for();

/// A few threads for the short loops of sessions on a device, in the place of torch's, which would
/// all be woken for each: as many as torch may use, eight at most. Sessions share them, and the
/// last one ends them.
ParallelFor few_threads_for();

}  // namespace kvswap
