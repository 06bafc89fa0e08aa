#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "engine/engine_options.h"
#include "engine/plan.h"
#include "engine/prefill/prefix_stream.h"

namespace kvswap {

/// Keys, [kv_heads, pages * group_tokens, head_dim], and values, of value_width(), of pages in the
/// model's dtype: a tensor of that dtype, [pages, elements of a group].
std::pair<at::Tensor, at::Tensor> split_pages(const EngineOptions& options,
                                              const at::Tensor& pages);

/// The same of a block of the past, by the host's kernels; in the block's room, if it has one.
std::pair<at::Tensor, at::Tensor> unpack_here(const Plan& plan, const PrefixStream::Block& block,
                                              const at::TensorOptions& like);

/// The same of a block of the past, on the device of `like` and of its dtype, in torch's own
/// operations: records of e4m3 are decoded there, exactly as decode_records() does.
std::pair<at::Tensor, at::Tensor> unpack_there(const Plan& plan, const PrefixStream::Block& block,
                                               const at::TensorOptions& like);

}  // namespace kvswap
