#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kvswap/prefill_attention.h"
#include "torch/expanded_queries.h"

namespace kvswap {

/// A prefill's chunk that attends exactly by expanded heads: the past streams by in blocks as it
/// does for any chunk, and a few hundred tokens at a time are expanded, attended and forgotten.
/// That is fewer products than a query that has taken the expansion in, where a chunk is long; who
/// calls counts them. On the host.
///
/// output: [batch, tokens, heads, value], contiguous. In `args` the attention's own query and
/// output are not looked at. Where an observation window is asked for it is of absorbed queries,
/// which meet records with the same scores.
std::unique_ptr<ExactChunk> expanded_chunk(Engine& engine, const ExactArgs& args,
                                           const ExpandedQueries& queries, at::Tensor output);

/// While one lives, exact chunks of this thread's calls of a TensorCache attend by expanded heads.
class ExpandedScope {
 public:
  ExpandedScope(ExpandedQueries queries, at::Tensor output);
  ~ExpandedScope();
  ExpandedScope(const ExpandedScope&) = delete;
  ExpandedScope& operator=(const ExpandedScope&) = delete;

  /// null: chunks attend what they are called with.
  static const ExpandedScope* current();
  std::unique_ptr<ExactChunk> begin(Engine& engine, const ExactArgs& args) const {
    return expanded_chunk(engine, args, queries_, output_);
  }

 private:
  const ExpandedQueries queries_;
  const at::Tensor output_;
};

}  // namespace kvswap
