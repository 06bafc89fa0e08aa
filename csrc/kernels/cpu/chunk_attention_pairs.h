#pragma once

#include "kernels/chunk_attention.h"

namespace kvswap {

/// Whether the CPU multiplies pairs of bf16 (AVX-512 BF16), and that level is in use.
bool has_bf16_pairs();

/// chunk_attention() of bf16 by such products; only where has_bf16_pairs().
void chunk_attention_by_pairs(const ChunkAttentionArgs& args, const Execution& execution);

}  // namespace kvswap
