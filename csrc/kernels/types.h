#pragma once

#include <cstdint>
#include <functional>

namespace kvswap {

/// Element types that kernels read and write. Arithmetic is fp32 inside. int4 is of summaries
/// alone: two columns of a row share a byte.
enum class DType : int8_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

/// Whole numbers in the place of floats, with a scale for each row.
constexpr bool has_row_scales(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kInt4;
}

/// Of an element; with int4 of what holds two of them.
constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : has_row_scales(dtype) ? 1 : 2;
}

/// Of a row of so many columns, its scale apart.
constexpr int64_t row_bytes(DType dtype, int64_t columns) {
  return dtype == DType::kInt4 ? (columns + 1) / 2 : columns * dtype_bytes(dtype);
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
