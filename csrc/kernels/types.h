#pragma once

#include <cstdint>
#include <functional>

namespace kvswap {

/// Element types that kernels read and write. Arithmetic is fp32 inside.
enum class DType : int8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

/// Runs body(begin, end) over disjoint pieces of [0, count), possibly on several threads, and
/// returns when all are done. A piece is at least `grain` long except the last.
using ParallelFor = std::function<void(
    int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body)>;

/// All on the calling thread: the reference, and what tests use.
inline void serial_for(int64_t count, int64_t /*grain*/,
                       const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}

/// Where a kernel runs: the CPU's threads, or a CUDA stream (opaque here; null on the CPU).
struct Execution {
  const ParallelFor* parallel = nullptr;  // null: serial
  void* stream = nullptr;
};

/// Runs body over [0, count) where `execution` says.
inline void run_parallel(const Execution& execution, int64_t count, int64_t grain,
                         const std::function<void(int64_t begin, int64_t end)>& body) {
  if (execution.parallel) {
    (*execution.parallel)(count, grain, body);
  } else {
    serial_for(count, grain, body);
  }
}

}  // namespace kvswap
