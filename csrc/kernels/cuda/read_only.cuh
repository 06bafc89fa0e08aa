#pragma once

#include <cuda_runtime.h>

namespace kvswap::cuda {

/// A load of what no thread writes while the kernel runs. An address that comes from a table could
/// point anywhere; this says that it is device memory, which spares the hardware the question and
/// lets loads pass the stores to shared memory.
template <typename Vector>
__device__ inline Vector load_read_only(const void* source) {
  return __ldg(static_cast<const Vector*>(source));
}

}  // namespace kvswap::cuda
