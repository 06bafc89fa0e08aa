#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "io/status.h"
#include "torch/op_checks.h"

namespace kvswap {

/// Makes a tensor's device the current one for a call, and knows torch's current stream of it.
/// Memory comes from torch's allocator alone, so it is safe on that stream.
class DeviceCall {
 public:
  DeviceCall(const char* where, const at::Tensor& first,
             std::initializer_list<std::pair<const char*, const at::Tensor*>> others)
      : guard_(first.device()), stream_(c10::cuda::getCurrentCUDAStream(first.device().index())) {
    for (const auto& [name, tensor] : others) {
      TORCH_CHECK_VALUE(tensor->device() == first.device(), where, ": ", name, " must be on ",
                        first.device(), ", got ", tensor->device());
    }
  }

  void* stream() const { return stream_.stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

inline void check_status(const Status& status) {
  TORCH_CHECK_VALUE(status.code() != StatusCode::kInvalid, status.message());
  TORCH_CHECK(status.is_ok(), status.message());
}

/// Contiguous, and where kernels may move 16 bytes at once: a slice may begin elsewhere.
inline at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kMoveBytes = 16;
  at::Tensor whole = tensor.contiguous();
  const auto begin = reinterpret_cast<uintptr_t>(whole.const_data_ptr());
  return begin % kMoveBytes == 0 ? whole : whole.clone();
}

inline at::Tensor counted(int64_t count, const at::Tensor& like) {
  return at::arange(count, like.options().dtype(at::kLong));
}

/// [count] int64: base, base + stride, ...: the addresses of `count` things that stand in a tensor.
inline at::Tensor addresses(const at::Tensor& tensor, int64_t stride_bytes, int64_t count) {
  return counted(count, tensor) * stride_bytes + reinterpret_cast<int64_t>(tensor.data_ptr());
}

inline at::Tensor make_scratch(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

template <typename T>
T* address_table(const at::Tensor& table) {
  return reinterpret_cast<T*>(table.data_ptr<int64_t>());
}

}  // namespace kvswap
