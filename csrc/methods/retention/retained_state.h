#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/types.h"
#include "methods/retention/retained_tokens.h"

namespace kvswap {

/// What a retained set may be, of one sequence and layer; see RetentionPlan.
struct RetainedLimits {
  int64_t positions = 0;  // that the layer holds
  int64_t sealed = 0;     // of them, in sealed groups
  int64_t group_tokens = 0;
  int64_t in_dtype_max = 0;     // retained tokens in the model's dtype
  int64_t tokens_max = 0;       // the same, of both precisions
  int64_t pages = 0;            // that both share
  int64_t float8_per_page = 0;  // so many pages of e4m3 take one
  int64_t note_bytes = 0;       // exponents of a page of e4m3; 0: there are none
  DType dtype = DType::kFloat32;
  int64_t heads = 0;  // of queries
  int64_t head_dim = 0;
  int64_t window = 0;  // queries that are observed at most
  int64_t step = 0;    // positions that one step may have
};

/// Pages of the model's dtype, and of e4m3, that retained tokens stand in.
struct RetainedPageCounts {
  int64_t in_dtype = 0;
  int64_t float8 = 0;
};
RetainedPageCounts page_counts(const RetainedTokens& retained, int64_t group_tokens);

/// All that a session knows of its retained tokens but their keys and values, for a saved one or a
/// fork: which they are, and what the next choice is made of.
std::vector<std::byte> retained_to_bytes(const RetainedTokens& retained);

/// The way back. Everything is checked, since nothing in a file may make a session read or write
/// where nothing is: what must hold and does not, as "hold positions that rise"; nothing: `kept` is
/// what was saved.
std::optional<std::string> retained_from_bytes(std::span<const std::byte> bytes,
                                               const RetainedLimits& limits,
                                               RetainedTokens& retained);

}  // namespace kvswap
