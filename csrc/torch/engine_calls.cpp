#include "torch/engine_calls.h"

#include <cerrno>

#include "torch/session_error.h"

namespace kvswap {

void throw_if_error(const Status& status) {
  using Kind = SessionError::Kind;
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalid:
      // A path that is not there is the caller's mistake and the world's: OSError says which.
      if (status.error_number() != 0) {
        throw SessionError(Kind::kStorage, status.message(), status.error_number(), status.path());
      }
      TORCH_CHECK_VALUE(false, status.message());
    case StatusCode::kBudget:
      throw SessionError(Kind::kBudget, status.message());
    case StatusCode::kStorage:
    case StatusCode::kLate:
      throw SessionError(Kind::kStorage, status.message(), status.error_number(), status.path());
    case StatusCode::kCorrupt:
      throw SessionError(Kind::kCorrupt, status.message(), status.error_number(), status.path());
    case StatusCode::kInterrupted:
      throw SessionError(status.error_number() == ECANCELED ? Kind::kClosed : Kind::kInterrupted,
                         status.message());
  }
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
