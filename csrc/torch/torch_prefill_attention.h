#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "kvswap/prefill_attention.h"

namespace kvswap {

/// Exact chunks by torch's own flash attention, block by block, merged by log-sum-exp in fp32;
/// scores that are capped take plain torch instead. The arrays are on `device`. In bf16 on a CPU
/// that multiplies pairs of it, but not whole tiles (AMX, which torch uses), it is
/// host_exact_attention(): torch widens to fp32 there.
/// Chunks of an ExpandedScope are expanded_chunk()'s.
std::shared_ptr<ExactAttention> torch_exact_attention(at::Device device);

}  // namespace kvswap
