#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/types.h"

namespace kvswap {

/// Attention of one sequence over some of its keys, ready to be merged with that over others.
struct PartialAttention {
  at::Tensor output;       // [heads, rows, width of V] fp32, or the query's type before a merge
  at::Tensor log_sum_exp;  // [heads, rows] fp32
};

enum class Causal { kNo, kYes };

/// How products become scores: scale * product, then softcap * tanh(score / softcap) if that is not
/// 0.
struct ScoreRule {
  double scale = 1;
  double softcap = 0;
};

/// softmax(scale * Q K^T) V with its log-sum-exp, by torch's own flash attention: the CPU's, or
/// CUDA's for 16-bit types and no mask, where scores are not capped. query [heads, rows, head_dim];
/// keys [kv_heads, count, head_dim], values as many and no wider; allowed [rows, count] bool, or
/// [count] for all rows; with Causal::kYes rows == count and there is no mask. A row that sees
/// nothing gets zeros and -inf, except on the CPU's flash attention, which must not be asked for
/// one.
PartialAttention attend_part(const at::Tensor& query, const at::Tensor& keys,
                             const at::Tensor& values, Causal causal,
                             const std::optional<at::Tensor>& allowed, const ScoreRule& rule);

/// The same in plain torch in fp32, some rows at a time, on any device: for what no flash attention
/// takes, and its reference.
PartialAttention attend_part_in_rows(const at::Tensor& query, const at::Tensor& keys,
                                     const at::Tensor& values, Causal causal,
                                     const std::optional<at::Tensor>& allowed,
                                     const ScoreRule& rule);

/// Values with zeros behind each row where keys are wider: torch's flash attention takes one width.
at::Tensor as_wide_as(const at::Tensor& values, const at::Tensor& keys);

/// A chunk over itself with padding in its middle, valid [count] bool: causal, valid keys only;
/// each row sees at least itself.
PartialAttention attend_own_masked(const at::Tensor& query, const at::Tensor& keys,
                                   const at::Tensor& values, const at::Tensor& valid,
                                   const ScoreRule& rule);

/// Whether chunk_attention() is the faster one: not without vectors, nor beside AMX, which torch
/// multiplies bf16 by.
bool is_chunk_attention_fast(DType dtype);

/// Weighs each head's sink in: a score without a value. sinks [heads] fp32.
void add_sinks(PartialAttention& partial, const at::Tensor& sinks);

/// Merges attentions over disjoint keys, in place.
void merge_part(PartialAttention& into, const PartialAttention& other);

/// The same in plain torch, on any device.
void merge_part_in_torch(PartialAttention& into, const PartialAttention& other);

}  // namespace kvswap
