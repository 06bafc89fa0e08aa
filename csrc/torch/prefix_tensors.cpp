#include "torch/prefix_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <vector>

#include "engine/sequence/token_codec.h"
#include "kernels/float8_exponent.h"
#include "kernels/records.h"
#include "torch/parallel.h"

namespace kvswap {
namespace {

/// Records of e4m3, [groups, payload_bytes()] bytes, as pages of `dtype`; those that stand
/// elsewhere are in that already.
at::Tensor decode_there(const Plan& plan, const PrefixStream::Block& block,
                        const at::Tensor& records, at::ScalarType dtype) {
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

std::pair<at::Tensor, at::Tensor> unpack_here(const Plan& plan, const PrefixStream::Block& block,
                                              const at::TensorOptions& like) {
  const EngineOptions& options = plan.options;
  const int64_t tokens = block.groups * options.group_tokens;
  const auto empty = [&](std::byte* room) {
    const std::array<int64_t, 3> sizes = {options.kv_heads, tokens, options.head_dim};
    return room == nullptr ? at::empty(sizes, like) : at::from_blob(room, sizes, like);
  };
  const at::Tensor keys = empty(block.room);
  const bool has_values = options.sides == 2;
  const at::Tensor values =
      !has_values ? keys
                  : empty(block.room == nullptr ? nullptr
                                                : block.room + plan.group_bytes / 2 * block.groups);
  std::vector<void*> records(block.groups);
  std::vector<int64_t> first_tokens(block.groups);
  for (int64_t i = 0; i < block.groups; ++i) {
    records[i] = const_cast<std::byte*>(block.listed->pages[i]);
    first_tokens[i] = i * options.group_tokens;
  }
  const int64_t head_stride = tokens * options.head_dim;
  const auto unpack_to = [&](void* const* from, const int64_t* first_token, int64_t count) {
    unpack_records({.shape = plan.record_shape,
                    .tokens = {.keys = keys.data_ptr(),
                               .values = has_values ? values.data_ptr() : nullptr,
                               .key_head_stride = head_stride,
                               .key_token_stride = options.head_dim,
                               .value_head_stride = head_stride,
                               .value_token_stride = options.head_dim},
                    .records = from,
                    .first_tokens = first_token,
                    .slots = nullptr,
                    .lengths = nullptr,
                    .count = count});
  };
  at_parallel_for()(block.groups, 16, [&](int64_t begin, int64_t end) {
    if (plan.has_float8_records) {
      std::vector<std::byte> room(plan.group_bytes);
      for (int64_t i = begin; i < end; ++i) {
        void* record = const_cast<std::byte*>(
            tokens_of_page(plan, block.listed->pages[i],
                           block.listed->exponents.data() + i * plan.note_bytes, room.data()));
        unpack_to(&record, &first_tokens[i], 1);
      }
      return;
    }
    unpack_to(records.data() + begin, first_tokens.data() + begin, end - begin);
  });
  return {keys, values};
}

std::pair<at::Tensor, at::Tensor> unpack_there(const Plan& plan, const PrefixStream::Block& block,
                                               const at::TensorOptions& like) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(like.dtype());
  const at::Tensor records = at::from_blob(const_cast<std::byte*>(block.records),
                                           {block.groups, plan.record_bytes}, at::kByte)
                                 .to(like.device())
                                 .narrow(1, 0, plan.payload_bytes)
                                 .contiguous();
  if (plan.has_float8_records) {
    return split_pages(plan.options, decode_there(plan, block, records, dtype));
  }
  const at::Tensor pages = records.view(dtype);
  for (int64_t i = 0; i < block.groups; ++i) {
    void* page = const_cast<std::byte*>(block.listed->pages[i]);
    if (page == block.records + i * plan.record_bytes) continue;
    pages[i].copy_(at::from_blob(page, {pages.size(1)}, dtype));  // a sink's
  }
  return split_pages(plan.options, pages);
}

}  // namespace kvswap
