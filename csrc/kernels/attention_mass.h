#pragma once

#include "kernels/paged_attention.h"

namespace kvswap {

struct AttentionMassArgs {
  /// Table, query, scale and softcap; log_sum_exp is read, values, sinks and output are not. Pages
  /// in e4m3 count as what they decode to.
  PagedAttentionArgs attention = {};
  float* mean = nullptr;    // [batch, kv_heads, pages_max * group_tokens] out
  float* square = nullptr;  // the same; null: not wanted
};

/// The attention that a page table's token slots got: the mean of the weights
/// exp(score - log_sum_exp), and the mean of their squares, over the query heads of a KV head
/// and the queries. 0 in slots that no query sees.
///
/// With the log_sum_exp that paged_attention() gives for the same arguments the means of a KV head
/// sum to 1 without sinks; one over more keys leaves the share of these. A query whose log_sum_exp
/// is -inf pays nothing. Sums are taken in a fixed order, whatever the number of threads.
void attention_mass(const AttentionMassArgs& args, const Execution& execution);

}  // namespace kvswap
