#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/prefill/prefix_stream.h"
#include "engine/retention/token_eviction.h"
#include "io/status.h"

namespace kvswap {

/// What attends, block by block, over the prefix of a long chunk: of one sequence, or of one KV
/// head of it where those are apart.
class PrefixVisitor {
 public:
  virtual ~PrefixVisitor() = default;
  /// Whether sealed blocks are unpacked, to PrefixStream::Block::room; else there need be none.
  virtual bool unpacks() const { return false; }
  /// Sealed groups; their records are the host's, and there during the call.
  virtual Status visit_sealed(const PrefixStream::Block& block) = 0;
  /// What is left of the tokens whose records are gone; all are before the chunk, and count.
  virtual Status visit_left(const SurvivingTokens& left) = 0;
  /// Positions [begin, end), newer than all sealed ones that were visited: keys and values
  /// [kv_heads, end - begin, head_dim or value_width()] of the host.
  virtual Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                              const std::byte* values) = 0;
};

}  // namespace kvswap
