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
  const RecordShape shape = options.record_shape();
  const at::Tensor by_head = pages.view({pages.size(0), shape.kv_heads, shape.head_elements()});
  const auto side = [&](int64_t first, int64_t width) {
    return by_head.narrow(2, first, shape.group_tokens * width)
        .unflatten(2, {shape.group_tokens, width})
        .permute({1, 0, 2, 3})
        .reshape({shape.kv_heads, -1, width});
  };
  return {side(0, shape.head_dim), side(shape.value_elements(), shape.value_width())};
}

std::pair<at::Tensor, at::Tensor> unpack_here(const Plan& plan, const PrefixStream::Block& block,
                                              const at::TensorOptions& like) {
  const EngineOptions& options = plan.options;
  const int64_t tokens = block.groups * options.group_tokens;
  const int64_t value_width = plan.record_shape.value_width();
  const auto empty = [&](std::byte* room, int64_t width) {
    const std::array<int64_t, 3> sizes = {options.kv_heads, tokens, width};
    return room == nullptr ? at::empty(sizes, like) : at::from_blob(room, sizes, like);
  };
  const at::Tensor keys = empty(block.room, options.head_dim);
  const bool has_values = options.sides == 2;
  const at::Tensor values =
      !has_values
          ? keys
          : empty(block.room == nullptr ? nullptr : block.room + keys.nbytes(), value_width);
  std::vector<void*> records(block.groups);
  std::vector<int64_t> first_tokens(block.groups);
  for (int64_t i = 0; i < block.groups; ++i) {
    records[i] = const_cast<std::byte*>(block.listed->pages[i]);
    first_tokens[i] = i * options.group_tokens;
  }
  const auto unpack_to = [&](void* const* from, const int64_t* first_token, int64_t count) {
    unpack_records({.shape = plan.record_shape,
                    .tokens = {.keys = keys.data_ptr(),
                               .values = has_values ? values.data_ptr() : nullptr,
                               .key_head_stride = tokens * options.head_dim,
                               .key_token_stride = options.head_dim,
                               .value_head_stride = tokens * value_width,
                               .value_token_stride = value_width},
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
