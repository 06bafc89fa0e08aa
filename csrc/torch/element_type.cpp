#include "torch/element_type.h"

namespace kvswap {

at::ScalarType scalar_type(ElementType type) {
  return type == ElementType::kFloat32    ? at::kFloat
         : type == ElementType::kBFloat16 ? at::kBFloat16
                                          : at::kHalf;
}

at::ScalarType scalar_type(DType type) {
  return type == DType::kFloat32    ? at::kFloat
         : type == DType::kBFloat16 ? at::kBFloat16
                                    : at::kHalf;
}

ElementType element_type(at::ScalarType type) {
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                    "session: dtype must be float32, bfloat16 or float16, got ", type);
  return type == at::kFloat      ? ElementType::kFloat32
         : type == at::kBFloat16 ? ElementType::kBFloat16
                                 : ElementType::kFloat16;
}

}  // namespace kvswap
