#include "torch/past_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <vector>

#include "kernels/float8_exponent.h"

namespace kvswap {
namespace {

/// Records of e4m3, [groups, payload_bytes()] bytes, as pages of `dtype`; those that stand
/// elsewhere are in that already.
at::Tensor decode_there(const Plan& plan, const PastStream::Block& block, const at::Tensor& records,
                        at::ScalarType dtype) {
  const int64_t sides = plan.note_bytes;  // K and V of each KV head
  std::vector<float> factors;
  for (const int8_t exponent : block.listed->exponents) {
    factors.push_back(exponent == kNotFloat8 ? 0.0f : power_of_exponent(exponent));
  }
  const at::Tensor by_side =
      at::tensor(factors).view({block.groups, sides, 1}).to(records.device());
  const at::Tensor values =
      records.view(at::kFloat8_e4m3fn).to(at::kFloat).view({block.groups, sides, -1});
  const at::Tensor pages = values.mul(by_side).to(dtype).view({block.groups, -1});
  for (int64_t i = 0; i < block.groups; ++i) {
    if (block.listed->exponents[i * sides] != kNotFloat8) continue;
    void* page = const_cast<std::byte*>(block.listed->pages[i]);
    pages[i].copy_(at::from_blob(page, {pages.size(1)}, dtype));
  }
  return pages;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> split_pages(const EngineOptions& options,
                                              const at::Tensor& pages) {
  const at::Tensor tokens = pages
                                .view({pages.size(0), options.kv_heads, options.sides,
                                       options.group_tokens, options.head_dim})
                                .permute({2, 1, 0, 3, 4})
                                .reshape({options.sides, options.kv_heads, -1, options.head_dim});
  return {tokens[0], tokens[options.sides - 1]};
}

std::pair<at::Tensor, at::Tensor> unpack_there(const Plan& plan, const PastStream::Block& block,
                                               const at::TensorOptions& like) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(like.dtype());
  const at::Tensor records = at::from_blob(const_cast<std::byte*>(block.records),
                                           {block.groups, plan.record_bytes}, at::kByte)
                                 .to(like.device())
                                 .narrow(1, 0, plan.payload_bytes)
                                 .contiguous();
  return split_pages(plan.options, plan.has_float8_records
                                       ? decode_there(plan, block, records, dtype)
                                       : records.view(dtype));
}

}  // namespace kvswap
