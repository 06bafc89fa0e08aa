#include "torch/engine_calls.h"

#include "kvswap/engine_calls.h"

namespace kvswap {

void throw_if_error(const Status& status) {
  const bool is_wrong_call = status.code() == StatusCode::kInvalid && status.error_number() == 0;
  TORCH_CHECK_VALUE(!is_wrong_call, status.message());
  throw_status(status);
}

DType engine_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, "session: dtype must be float32, bfloat16 or float16, got ", dtype);
  }
}

QueryView query_view(const at::Tensor& query) {
  return {.data = query.data_ptr(),
          .batch_stride = query.stride(0),
          .head_stride = query.stride(1),
          .query_stride = query.stride(2),
          .heads = query.size(1),
          .queries = query.size(2),
          .dtype = engine_dtype(query.scalar_type())};
}

}  // namespace kvswap
