#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/types.h"
#include "kvswap/model_shape.h"

namespace kvswap {

// What torch calls a type of elements, and back; c10::ValueError for one that no cache has.

at::ScalarType scalar_type(ElementType type);
at::ScalarType scalar_type(DType type);
ElementType element_type(at::ScalarType type);

}  // namespace kvswap
