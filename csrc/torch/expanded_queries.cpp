#include "torch/expanded_queries.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>

namespace kvswap {

at::Tensor ExpandedQueries::absorbed() const {
  const at::Tensor plain = query.narrow(3, 0, unrotated);
  const at::Tensor rotated = query.narrow(3, unrotated, rotary());
  return at::cat({at::matmul(plain, weight.narrow(1, 0, unrotated)), rotated}, 3);
}

}  // namespace kvswap
