#pragma once

#include "kernels/chunk_attention.h"

namespace kvswap {

/// chunk_attention() of bf16 by such products; only where has_bf16_pairs().
void chunk_attention_by_pairs(const ChunkAttentionArgs& args, const Execution& execution);

}  // namespace kvswap
